"""Studies of one function each: `errors`, `bounds` and `plan`."""
