"""The layers models are made of: single-device code that gets its share of the mesh as an `Axis`."""
