"""One legend of tensor shapes for the whole library.

==  =============================================================
B   sequences in the batch
H   query heads
G   key and value heads; H is a multiple of G
Tq  queries of each sequence
Tk  keys of each sequence
T   positions of one sequence
D   width of a query and key head
Dv  width of a value head
==  =============================================================

The names below are ``Tensor`` to a type checker; the shape travels with the annotation for the reader.
"""

from typing import Annotated

from torch import Tensor

Queries = Annotated[Tensor, "B H Tq D"]
Keys = Annotated[Tensor, "B G Tk D"]
Values = Annotated[Tensor, "B G Tk Dv"]
Output = Annotated[Tensor, "B H Tq Dv"]
RowLogits = Annotated[Tensor, "B H Tq"]
Sink = Annotated[Tensor, "() | H | H Tq | B H Tq"]
HeadSlopes = Annotated[Tensor, "H"]
ScoreBias = Annotated[Tensor, "H Tq Tk | B H Tq Tk"]
QueryPositions = Annotated[Tensor, "B Tq"]
KeyPositions = Annotated[Tensor, "B Tk"]
KeyMask = Annotated[Tensor, "B Tk"]
DocumentIds = Annotated[Tensor, "B Tk"]
