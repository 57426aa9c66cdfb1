"""What lies between the q, k and v product and attention: norms of heads, rotation, three arrays out of one."""
