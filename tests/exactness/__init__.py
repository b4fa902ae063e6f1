"""The exactness matrix: every mask, layout, rank count, length, head count, dtype and batch."""
