"""Before training: bytes on the wire, times, and the choice of a method."""
