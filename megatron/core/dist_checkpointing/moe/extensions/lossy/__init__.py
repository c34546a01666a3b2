"""The lossy strategies, `pec` (MoC) and `selective` (MOETION): experts left out of snapshots, every lost token counted.

Both are `strategy.Lossy` with a selector of experts: `pec_selection` takes K of each layer in turn or by load,
`selection` takes those with the most tokens at risk, as many as the links carry. `ledger` counts what a recovery costs.
"""
