"""The parts of `bisect`: blobs of a wrong net, the search for its first wrong layer, and the smallest wrong part."""
