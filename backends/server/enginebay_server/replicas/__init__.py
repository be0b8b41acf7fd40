"""Several engine processes behind one address: `enginebay serve --replicas N`."""
