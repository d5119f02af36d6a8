"""How a rank is asked to stop, how long that may take, and how it says why it left."""
