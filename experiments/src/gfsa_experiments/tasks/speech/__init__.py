"""Speech recognition: settings, data, models, loss and search."""
