from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, known_shape, layer_pass, require

TWICE = op("Concat", where=lambda concat: len(concat.inputs) == 2 and concat.inputs[0] is concat.inputs[1])


@layer_pass(TWICE, exact=False, purpose="language models with each angle twice in their tables")
def halve_rotary_tables(concat: Layer) -> Replacement | None:
    """Concat(x, x) ── cos, sin ── RotaryEmbed   ⇒   x ── cos, sin ── RotaryEmbed

    RotaryEmbed reads only the first half of a row, so a table of half the width has the same effect.
    """
    rank, width = len(known_shape(concat.output)), known_shape(concat.output)[concat["axis"]]
    halves = {concat.output: (concat.inputs[0], concat["axis"] % rank)}  # for each blob: its half, and the axis
    added: list[tuple[Layer, Layer | None]] = []
    takes: dict[Layer, Layer] = {}
    pending = [concat.output]
    while pending:
        blob = pending.pop()
        half, axis = halves[blob]
        require(not blob.is_output, f"'{blob.name}' is an output")
        for user in blob.users:
            rotates = user.type == "RotaryEmbed" and not user["interleaved"] and user.inputs[0] is not blob
            if rotates and axis == rank - 1:
                require(known_shape(user.output)[-1] == width, f"'{user.name}' reads more than half of a row")
                takes[user] = user.having(inputs=[half if b is blob else b for b in takes.get(user, user).inputs])
                continue
            transposes = user.type == "Permute" and rank == 2 and user["order_type"] == 1
            if not transposes and (user.type not in ("UnaryOp", "BinaryOp") or len(user.inputs) > 1):
                return None
            new = Blob(f"{user.output.name}_half", batch=user.output.batch)
            added.append((user.having(inputs=[half], outputs=[new]), user))
            halves[user.output] = new, 1 - axis if transposes else axis
            pending.append(user.output)
    removed = [concat, *(user for _, user in added if user)]
    return Replacement((*removed, *takes), takes=takes, added=added) if takes else None
