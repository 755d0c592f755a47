"""Methods of other papers, one in each file."""
