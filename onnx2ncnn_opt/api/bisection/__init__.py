"""The parts of `bisect`: the blobs of a wrong net, the search for its first wrong layer, and the part to write."""
