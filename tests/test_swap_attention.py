import copy
import inspect
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import bertfast
from bertfast.swap.attention_interface import attention_forward
from helpers.checkpoints import saved_stock, tiny_stock
from helpers.models import NO_DROPOUT, PADDING, inputs_of, mask_of
from helpers.tolerance import assert_models_within

BASES = {"bert": "BertModel", "roberta": "RobertaModel", "distilbert": "DistilBertModel"}
SIZES = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
DECODERS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=3)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=4)
    ),
    "bert": lambda: transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True)),
}
MASKS = {
    "none": None,
    "two-dimensional": mask_of("holes"),
    "bool": mask_of("left").bool(),
    "float": mask_of("right").double(),
    "keys": mask_of("holes").bool()[:, None, None],
    "pairs": torch.ones(3, 1, 7, 7).bernoulli(0.6, generator=torch.Generator().manual_seed(0)).bool()
    | torch.eye(7).bool(),
    "added": torch.randn(3, 1, 7, 7, generator=torch.Generator().manual_seed(0)).double(),
    "of heads": torch.randn(3, 3, 7, 7, generator=torch.Generator().manual_seed(1)).double(),
}


@pytest.fixture(autouse=True)
def _registered():
    bertfast.register_attention()


def with_attention(model: nn.Module, implementation: str) -> nn.Module:
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model


def decoder(name: str) -> nn.Module:
    torch.manual_seed(0)
    return DECODERS[name]().eval().double()


def tiny(family: str, **fields) -> nn.Module:
    return tiny_stock(BASES[family], **{**NO_DROPOUT[family], **fields}).double()


@pytest.mark.parametrize("kind", PADDING)
@pytest.mark.parametrize("family", BASES)
def test_encoders_equal_sdpa_under_padding(family, kind):
    model, inputs = tiny(family), inputs_of(BASES[family], kind)
    stock = with_attention(model, "sdpa")(**inputs).last_hidden_state
    assert torch.equal(with_attention(model, "bertfast")(**inputs).last_hidden_state, stock)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("family", BASES)
def test_encoders_equal_sdpa_under_masks(family, kind):
    model = tiny(family)
    inputs = {**inputs_of(BASES[family]), "attention_mask": MASKS[kind]}
    stock = with_attention(model, "sdpa")(**inputs).last_hidden_state
    assert torch.equal(with_attention(model, "bertfast")(**inputs).last_hidden_state, stock)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", BASES)
def test_encoders_are_within_the_tolerance_with_gradients(family, dtype):
    model, mask = tiny(family), mask_of("right")
    inputs = inputs_of(BASES[family], mask)
    assert_models_within(with_attention(model, "bertfast"), model, inputs, dtype=dtype, real=mask)


@pytest.mark.parametrize("padding", [None, "right", "left", "holes"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_equal_sdpa(name, padding):
    model = decoder(name)
    inputs = inputs_of("BertModel", padding, types=False)
    inputs.pop("token_type_ids", None)
    ours, stock = (with_attention(model, kind)(**inputs).logits for kind in ("bertfast", "sdpa"))
    assert torch.equal(ours, stock)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_generate_what_sdpa_does(name):
    model = decoder(name)
    inputs = inputs_of("BertModel", "left", types=False)
    inputs = {"input_ids": inputs["input_ids"][:2], "attention_mask": inputs["attention_mask"][:2]}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    ours, stock = (with_attention(model, kind).generate(**inputs, **options) for kind in ("bertfast", "sdpa"))
    assert torch.equal(ours.sequences, stock.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), rtol=0, atol=0)


def test_packed_positions_of_a_decoder_equal_sdpa():
    model, ids = decoder("llama"), inputs_of("BertModel")["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    ours, stock = (
        with_attention(model, kind)(input_ids=ids, position_ids=positions, use_cache=False).logits
        for kind in ("bertfast", "sdpa")
    )
    assert torch.equal(ours, stock)
    alone = with_attention(model, "sdpa")(input_ids=ids[:, 3:]).logits
    torch.testing.assert_close(ours[:, 3:], alone)


def test_cross_attention_equals_sdpa():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    model = transformers.BertModel(config).eval().double()
    inputs = inputs_of("BertModel", "left", types=False)
    memory = torch.randn(3, 5, 24, dtype=torch.float64)
    seen = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 1]])
    for mask in (None, seen):
        ours, stock = (
            with_attention(model, kind)(**inputs, encoder_hidden_states=memory, encoder_attention_mask=mask)[0]
            for kind in ("bertfast", "sdpa")
        )
        assert torch.equal(ours, stock)


@pytest.mark.parametrize(
    "create",
    [
        "create_causal_mask",
        "create_bidirectional_mask",
        "create_sliding_window_causal_mask",
        "create_chunked_causal_mask",
        "create_bidirectional_sliding_window_mask",
    ],
)
@pytest.mark.parametrize("kind", [None, *PADDING])
@pytest.mark.parametrize("overlay", [None, "and_mask_function", "or_mask_function"])
def test_masks_are_those_of_sdpa(create, kind, overlay):
    if not hasattr(masking_utils, create):
        pytest.skip(f"transformers {transformers.__version__} has no {create}")
    create = getattr(masking_utils, create)
    embeds = torch.zeros(3, 7, 24)
    fields = {
        "inputs_embeds": embeds,
        "input_embeds": embeds,
        "attention_mask": None if kind is None else mask_of(kind),
        "cache_position": torch.arange(7),
        "past_key_values": None,
        "cache": None,
    }
    if overlay is not None:
        fields[overlay] = lambda batch, head, query, key: (query + key) % 3 == 0
    taken = {name: value for name, value in fields.items() if name in inspect.signature(create).parameters}
    masks = []
    for implementation in ("bertfast", "sdpa"):
        config = transformers.LlamaConfig(**SIZES, attn_implementation=implementation)
        config.sliding_window, config.attention_chunk_size = 3, 4
        masks.append(create(config=config, **taken))
    ours, stock = masks
    if stock is None:
        assert ours is None
    else:
        assert ours.dtype == torch.bool and torch.equal(ours.expand_as(stock), stock)


def test_a_padding_mask_is_not_expanded_to_pairs():
    config = transformers.BertConfig(**SIZES, attn_implementation="bertfast")
    fields = {"config": config, "attention_mask": mask_of("right")}
    name = next(n for n in inspect.signature(masking_utils.create_bidirectional_mask).parameters if "embeds" in n)
    mask = masking_utils.create_bidirectional_mask(**fields, **{name: torch.zeros(3, 7, 24)})
    assert mask.shape == (3, 1, 1, 7)


def test_a_mask_that_must_be_materialised_has_the_shape_of_sdpa():
    create = masking_utils.create_bidirectional_mask
    if "allow_is_bidirectional_skip" not in inspect.signature(create).parameters:
        pytest.skip(f"transformers {transformers.__version__} materialises no mask on demand")
    shapes = []
    for implementation in ("bertfast", "sdpa"):
        config = transformers.BertConfig(**SIZES, attn_implementation=implementation)
        mask = create(config, torch.zeros(3, 7, 24), mask_of("right"), allow_is_bidirectional_skip=False)
        shapes.append(mask.shape)
    assert shapes[0] == shapes[1]


def layer(groups: int = 1, is_causal: bool = False) -> nn.Module:
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = groups, is_causal
    return module


def qkv(groups: int = 1, s_q: int = 5, s_k: int = 5, value_dim: int = 6, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, s_q, 6), (2, 4 // groups, s_k, 6), (2, 4 // groups, s_k, value_dim))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


FLOAT_MASK = torch.randn(2, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, FLOAT_MASK > -0.5, FLOAT_MASK], ids=["none", "bool", "float"])
@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("of_module", [True, False])
def test_the_function_equals_sdpa(groups, mask, is_causal, of_module):
    arguments = (layer(groups, of_module), *qkv(groups), mask)
    ours, weights = attention_forward(*arguments, scaling=0.3, is_causal=is_causal)
    stock, _ = sdpa_attention_forward(*arguments, scaling=0.3, is_causal=is_causal)
    assert weights is None and ours.shape == (2, 5, 4, 6) and ours.is_contiguous()
    torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("s_q, s_k", [(1, 5), (3, 5), (5, 3), (1, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_lengths_that_differ_equal_sdpa(s_q, s_k, groups):
    arguments = (layer(groups, True), *qkv(groups, s_q, s_k), None)
    torch.testing.assert_close(attention_forward(*arguments)[0], sdpa_attention_forward(*arguments)[0])


def test_wider_values_and_one_query_for_all_equal_sdpa():
    query, key, value = qkv(2, value_dim=9)
    for arguments in ((layer(2), query, key, value, None), (layer(2), query[:1], key, value, None)):
        torch.testing.assert_close(attention_forward(*arguments)[0], sdpa_attention_forward(*arguments)[0])


def test_dropout_is_that_of_sdpa():
    arguments = (layer(), *qkv(), None)
    torch.manual_seed(0)
    ours, _ = attention_forward(*arguments, dropout=0.5)
    torch.manual_seed(0)
    stock, _ = sdpa_attention_forward(*arguments, dropout=0.5)
    assert torch.equal(ours, stock)
    assert not torch.equal(ours, attention_forward(*arguments)[0])


def test_a_query_without_keys_gives_zeros_and_no_gradient():
    leaves = [t.requires_grad_() for t in qkv()]
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1] = False
    for wanted in (False, True):
        out, _ = attention_forward(layer(), *leaves, mask, output_attentions=wanted)
        assert (out[1] == 0).all() and (out[0] != 0).all()
        for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)):
            assert (grad[1] == 0).all() and grad.isfinite().all()


@pytest.mark.parametrize("mask", [None, FLOAT_MASK > -0.5, FLOAT_MASK], ids=["none", "bool", "float"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_position_bias_equals_sdpa(mask, is_causal):
    if "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:
        pytest.skip(f"transformers {transformers.__version__} has no position_bias")
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    arguments = (layer(2, is_causal), *qkv(2), mask)
    ours, stock = (f(*arguments, position_bias=bias)[0] for f in (attention_forward, sdpa_attention_forward))
    torch.testing.assert_close(ours, stock)
    cotangent = torch.randn_like(stock)
    torch.testing.assert_close(*(torch.autograd.grad(out, bias, cotangent)[0] for out in (ours, stock)))


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_changes_scores_is_refused(name):
    with pytest.raises(ValueError, match=name):
        attention_forward(layer(), *qkv(), None, **{name: 30.0})
    attention_forward(layer(), *qkv(), None, **{name: None})


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("by_config", [False, True])
def test_attentions_are_those_of_eager(family, by_config):
    model, inputs = tiny(family), inputs_of(BASES[family], "right")
    asked = {} if by_config else {"output_attentions": True}
    results = {}
    for kind in ("bertfast", "eager"):
        asking = with_attention(model, "eager")
        asking.config.output_attentions = by_config
        results[kind] = with_attention(asking, kind)(**inputs, **asked)
    ours, stock = results["bertfast"], results["eager"]
    assert len(ours.attentions) == len(stock.attentions) == 2
    for mine, theirs in zip(ours.attentions, stock.attentions, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(ours.last_hidden_state, stock.last_hidden_state)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_sequences_stay_apart(groups, is_causal):
    query, key, value = (t[:1] for t in qkv(groups, 7, 7))
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 4, "max_length_k": torch.tensor(4)}
    ours, _ = attention_forward(layer(groups, is_causal), query, key, value, None, **packed)
    assert ours.is_contiguous()
    for rows in (slice(0, 3), slice(3, 7)):
        one = (t[:, :, rows] for t in (query, key, value))
        alone, _ = sdpa_attention_forward(layer(groups, is_causal), *one, None)
        torch.testing.assert_close(ours[:, rows], alone)


def test_a_position_bias_is_not_lost_to_packing():
    arguments = (layer(), *(t[:1] for t in qkv(1, 7, 7)), None)
    starts, bias = torch.tensor([0, 3, 7], dtype=torch.int32), torch.randn(1, 4, 7, 7, dtype=torch.float64)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 4, "max_length_k": 4}
    ours, _ = attention_forward(*arguments, position_bias=bias, **packed)
    assert torch.equal(ours, attention_forward(*arguments, position_bias=bias)[0])


def test_a_packed_encoder_equals_its_sequences():
    model = with_attention(tiny("bert"), "bertfast")
    ids = inputs_of("BertModel")["input_ids"][:1]
    positions, starts = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 4, "max_length_k": 4}
    ours = model(input_ids=ids, position_ids=positions, **packed).last_hidden_state
    torch.testing.assert_close(ours[:, :3], model(input_ids=ids[:, :3]).last_hidden_state)
    torch.testing.assert_close(ours[:, 3:], model(input_ids=ids[:, 3:]).last_hidden_state)


def test_the_kernels_run_where_they_are_asked_for():
    pytest.importorskip("triton")
    arguments = (layer(2), *qkv(2, dtype=torch.float32), FLOAT_MASK > -0.5)
    with bertfast.use_backend("triton"):
        ours, _ = attention_forward(*arguments)
    assert ours.is_contiguous() and ours.dtype == torch.float32
    torch.testing.assert_close(ours, sdpa_attention_forward(*arguments)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_the_dtype_of_sdpa(dtype):
    model, inputs = tiny("bert").float(), inputs_of("BertModel", "right")
    with torch.autocast("cpu", dtype):
        ours, stock = (with_attention(model, kind)(**inputs).last_hidden_state for kind in ("bertfast", "sdpa"))
    assert ours.dtype == stock.dtype
    # Scores and probabilities of SDPA are rounded to the dtype, ours are not.
    torch.testing.assert_close(ours, stock, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiles_in_one_graph(name):
    model = with_attention(decoder(name) if name == "llama" else tiny(name), "bertfast")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    options = {"use_cache": False} if name == "llama" else {}
    for kind, shape in (("right", None), (None, (2, 5)), (None, (3, 9))):
        inputs = inputs_of(BASES.get(name, "DistilBertModel"), kind, **({} if shape is None else {"shape": shape}))
        with torch.no_grad():
            torch.testing.assert_close(compiled(**inputs, **options)[0], model(**inputs, **options)[0])


def test_exports_with_dynamic_batch_and_length():
    model = with_attention(tiny("distilbert"), "bertfast")
    batch, length = torch.export.Dim("batch", min=2, max=8), torch.export.Dim("length", min=2, max=20)
    shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    program = torch.export.export(
        model, (), inputs_of("DistilBertModel", "right", types=False), dynamic_shapes=shapes, strict=False
    ).module()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 61, (2, 11), generator=generator)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, 4:] = 0
    ours, theirs = (f(input_ids=ids, attention_mask=mask).last_hidden_state for f in (program, model))
    torch.testing.assert_close(ours, theirs)


def test_loads_with_it_and_saves_without_it(tmp_path):
    folder = saved_stock(tmp_path / "stock", "BertForSequenceClassification")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="bertfast")
    assert model.config._attn_implementation == "bertfast"
    model.save_pretrained(tmp_path / "ours")
    text = (tmp_path / "ours" / "config.json").read_text()
    assert "bertfast" not in text and '"BertForSequenceClassification"' in text
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    inputs = inputs_of("BertModel", "right")
    torch.testing.assert_close(model.eval()(**inputs).logits, stock.eval()(**inputs).logits)


def test_registering_twice_is_once():
    interface = transformers.AttentionInterface()
    before = interface["bertfast"], len(interface)
    bertfast.register_attention()
    assert (interface["bertfast"], len(interface)) == before
    assert "bertfast" in transformers.AttentionMaskInterface()


def test_nothing_is_registered_or_imported_before_the_call():
    code = "import sys, bertfast; bertfast.register_attention; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
