"""Finds masks by name: from command-line options and from saved specs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ultraattn.errors import InputError
from ultraattn.masks.base import JSON, Mask
from ultraattn.masks.causal import causal
from ultraattn.masks.combine import And, Or
from ultraattn.masks.document import document
from ultraattn.masks.from_block_mask import block_mask_of_spec
from ultraattn.masks.from_blocks import from_blocks
from ultraattn.masks.from_ranges import from_ranges
from ultraattn.masks.full import full
from ultraattn.masks.global_local import global_local
from ultraattn.masks.sliding_window import sliding_window
from ultraattn.masks.star import star
from ultraattn.masks.streaming import streaming
from ultraattn.masks.strided import strided


@dataclass(frozen=True)
class Named:
    """A mask's factory, its parameters, and the defaults of those that have one."""

    factory: Callable[..., Mask]

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameter names, in order."""
        return tuple(inspect.signature(self.factory).parameters)

    @property
    def defaults(self) -> dict[str, object]:
        """Parameters that may be left out, and their values then."""
        found = inspect.signature(self.factory).parameters.values()
        return {p.name: p.default for p in found if p.default is not p.empty}

    @property
    def required(self) -> tuple[str, ...]:
        """Parameters that must be given."""
        return tuple(name for name in self.parameters if name not in self.defaults)


NAMES: Mapping[str, Named] = {
    factory.__name__: Named(factory)
    for factory in (
        full,
        causal,
        sliding_window,
        document,
        strided,
        global_local,
        star,
        streaming,
        from_ranges,
        from_blocks,
    )
}
"""The masks that name and parameters determine, as the command line offers them."""


def by_name(name: str, **params: object) -> Mask:
    """The mask `name` with these parameters.

    Raises:
        InputError: an unknown name, or an unknown, missing or impossible parameter.
    """
    if name not in NAMES:
        raise InputError(f"unknown mask {name!r}; choose one of {', '.join(NAMES)}")
    return _call(name, NAMES[name], params)


def from_spec(spec: Mapping[str, JSON]) -> Mask:
    """The mask that `Mask.spec` described.

    Raises:
        InputError: the spec is not one.
    """
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise InputError(f"mask spec {spec!r}: expected an object with a name")
    name = str(spec["name"])
    params = {key: value for key, value in spec.items() if key != "name"}
    pairs = {And.name: And, Or.name: Or}
    if name in pairs:
        parts = params.pop("masks", None)
        if params or not isinstance(parts, list) or len(parts) != 2:
            raise InputError(f"mask spec {name!r}: expected two specs under masks and nothing else")
        left, right = (from_spec(part) for part in parts)  # type: ignore[arg-type]
        return pairs[name](left, right)
    if name == "from_block_mask":
        return _call(name, Named(block_mask_of_spec), params)
    return by_name(name, **params)


def _call(name: str, named: Named, params: Mapping[str, object]) -> Mask:
    unknown = [key for key in params if key not in named.parameters]
    missing = [key for key in named.required if key not in params]
    if unknown or missing:
        takes = ", ".join(named.parameters) or "no parameters"
        what = f"does not take {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
        raise InputError(f"mask {name} {what}; it takes {takes}")
    return named.factory(**params)
