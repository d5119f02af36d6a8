"""How ranks meet and talk under MindSpore, without `msrun`."""
