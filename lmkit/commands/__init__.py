"""One module per command: wires the parts below together and returns a result object. Prints nothing."""
