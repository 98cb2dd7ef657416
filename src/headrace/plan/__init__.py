"""What a layout costs before it runs: bytes, operations and time, from the spec and the mesh alone."""
