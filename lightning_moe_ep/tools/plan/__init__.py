"""What a run will need, layout by layout, before it starts."""
