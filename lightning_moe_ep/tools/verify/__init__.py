"""Is a run right? One step of it on its own ranks, and once in one process, compared."""
