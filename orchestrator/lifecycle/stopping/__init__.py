"""How a rank is stopped, the time limit of the stop, and the record of why it left."""
