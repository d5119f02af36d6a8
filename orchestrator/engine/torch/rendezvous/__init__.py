"""How ranks meet: a store on rank 0, its secret, and one decision for all."""
