"""Measures this machine into a cluster: plans and runs small problems over local ranks."""
