"""The one way to time, to count memory, to describe the machine, and to make tables and pictures of rows."""
