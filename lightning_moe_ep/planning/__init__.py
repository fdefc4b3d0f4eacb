"""What shapes, a layout and figures of a machine say of a run before there is one: arithmetic, nothing is built."""
