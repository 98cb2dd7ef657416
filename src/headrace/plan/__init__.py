"""What a layout would do before a byte of it is loaded: hardware, prices, splits, and the engine in virtual time."""
