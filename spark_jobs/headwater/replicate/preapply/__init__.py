"""Large transactions that are written while they are open."""
