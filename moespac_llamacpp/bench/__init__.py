"""The comparison with llama.cpp: one command, alternating runs, the same VRAM bytes, outputs compared."""
