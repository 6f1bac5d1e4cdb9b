"""Represents a whole step as a program: a list of ops over named values, which is printed and verified.

Each op of a program calls a traced subgraph, moves data (a start, and later its wait) or does
something small, such as a cast. Every value has a placement on the mesh and a memory tier. A
rewrite takes a program and returns another one; the verifier runs after each. The full text that
`printer.py` writes is the code that runs. This folder knows no transforms: it imports nothing from
`transforms/`, `compiler/` or `plan/`.

| file | what it does |
|---|---|
| `program.py` | the data types: programs, ops (`Instruction`), values, placements, subgraphs and buffers |
| `attributes.py` | the attributes of each op, as frozen dataclasses |
| `ops/` | the table of ops: how each is verified, executed, printed and costed |
| `from_graph.py` | records functions on abstract values, and turns the graphs into ops and subgraphs |
| `value_names.py` | names the values of a program, by short names made of the user's own |
| `aliases.py` | says which results may share memory with which arguments |
| `dependencies.py` | finds which ops must come after which, and sorts ops accordingly (a list scheduler) |
| `liveness.py` | computes live ranges of values, including reads by other ranks from shared memory |
| `verifier.py` | verifies the rules of a program after every rewrite |
| `pool_verifier.py` | verifies the arena: no op overwrites bytes that are still read, here or by another rank |
| `stage_verifier.py` | verifies that the sends and receives of pipeline stages match and cannot deadlock |
| `printer.py` | prints a program: to be read, with loops over layers, or in full, as it runs |
"""
