"""The fifteen data sets of CoOp's protocol."""
