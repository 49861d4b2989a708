"""What a layout will cost before it runs: hardware, memory, time, and the search for the best. Imports no torch."""
