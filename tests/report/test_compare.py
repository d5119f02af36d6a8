"""Weights against weights: numpy's own arithmetic is the judge."""

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

from orchestrator.errors import UsageError
from orchestrator.report import compare as module
from orchestrator.report.compare import compare, print_comparison

NUMPY_DTYPES = [
    np.dtype(name)
    for name in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


def both(folder, a, b, **extra):
    """Compare two dictionaries of arrays by way of files."""
    save_file(a, folder / "a.safetensors")
    save_file(b, folder / "b.safetensors", **extra)
    return compare(folder / "a.safetensors", folder / "b.safetensors")


def raw(path, tensors):
    """A safetensors file from {name: (dtype, shape, bytes)}, for what numpy has no dtype for."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def exact(array):
    """Arrays as Python numbers, in which integers do not overflow or round."""
    return [x.item() for x in array.ravel()]


@settings(max_examples=150)
@given(data=st.data(), dtype=st.sampled_from(NUMPY_DTYPES))
def test_finite_tensors_agree_with_numpy(folder, data, dtype):
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    elements = None
    if dtype.kind == "f":
        bound = 2.0**15 if dtype.itemsize == 2 else 2.0**100
        elements = st.floats(-bound, bound, width=8 * dtype.itemsize)
    elif dtype.kind == "c":
        elements = st.complex_numbers(max_magnitude=2.0**60, width=64)
    a, b = (data.draw(hnp.arrays(dtype, shape, elements=elements)) for _ in "ab")
    found = both(folder, {"w": a}, {"w": b}).tensors["w"]
    difference = max((abs(x - y) for x, y in zip(exact(a), exact(b), strict=True)), default=0)
    scale = max((abs(y) for y in exact(b)), default=0)
    expected = 0 if difference == 0 else math.inf if scale == 0 else difference / scale
    assert found.max_absolute_difference == pytest.approx(float(difference), rel=1e-12)
    assert found.max_relative_difference == pytest.approx(expected, rel=1e-12)
    assert found.equal_bits == (a.tobytes() == b.tobytes())
    assert found.shape == shape
    assert found.dtype == str(dtype)


@given(a=hnp.arrays("f4", 5), b=hnp.arrays("f4", 5))
def test_what_is_not_finite_equals_only_the_same_bits(folder, a, b):
    found = both(folder, {"w": a}, {"w": b}).tensors["w"]
    unlike = a.view("u4") != b.view("u4")
    if (unlike & ~(np.isfinite(a) & np.isfinite(b))).any():
        assert found.max_relative_difference == math.inf
    else:
        assert math.isfinite(found.max_absolute_difference)
    assert found.equal_bits == (not unlike.any())


def test_signalling_nans_are_compared_without_a_warning(folder):
    a = np.array([0x7F800001, 0x3F800000], "u4").view("f4")
    b = np.array([0x7FC00000, 0x3F800000], "u4").view("f4")
    assert both(folder, {"w": a}, {"w": a}).max_relative_difference == 0
    assert both(folder, {"w": a}, {"w": b}).max_relative_difference == math.inf


def test_the_largest_tensor_counts_each_by_its_own_scale(folder):
    a = {"big": np.array([1e6, 1.0]), "small": np.array([1e-6])}
    b = {"big": np.array([1e6, 2.0]), "small": np.array([2e-6])}
    found = both(folder, a, b)
    assert found.max_relative_difference == pytest.approx(0.5)
    assert found.tensors["big"].max_relative_difference == pytest.approx(1e-6)


def test_a_counter_is_no_weight_that_is_far_from_another(folder):
    a = {"w": np.array([1.0, 2.0]), "batches": np.array(33), "ids": np.array([7])}
    found = both(folder, a, {**a, "batches": np.array(66)})
    assert (found.max_relative_difference, found.equal_bits) == (0.0, False)
    assert found.tensors["batches"].max_relative_difference == pytest.approx(0.5)
    assert both(folder, a, {**a, "ids": np.array([14])}).max_relative_difference == 0.5


def test_every_bfloat16_has_the_value_of_the_float32_that_it_is_the_upper_half_of(folder):
    bits = np.arange(1 << 16, dtype="<u2")
    path = raw(folder / "narrow", {"w": ("BF16", [bits.size], bits.tobytes())})
    found = module.SafetensorsFile(path).tensors["w"].values(0, bits.size)
    expected = [struct.unpack("<f", struct.pack("<HH", 0, int(n)))[0] for n in bits]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found, np.array(expected, "f4"))
    assert compare(path, path).max_relative_difference == 0


def test_other_dtypes_are_compared_by_value_and_never_have_equal_bits(folder):
    found = both(folder, {"w": np.ones(2, "f4")}, {"w": np.ones(2, "f8")})
    assert (found.max_relative_difference, found.equal_bits) == (0, False)
    assert found.tensors["w"].dtype == "float32 and float64"


def test_pieces_add_up_to_the_whole(folder, monkeypatch):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 1000))
    whole = both(folder, {"w": a}, {"w": b})
    monkeypatch.setattr(module, "PIECE", 7)
    assert both(folder, {"w": a}, {"w": b}) == whole


def test_other_names_and_shapes_are_listed(folder):
    a = {"same": np.ones(1), "mine": np.ones(1), "shape": np.ones((2, 3))}
    b = {"same": np.ones(1), "yours": np.ones(1), "shape": np.ones((3, 2))}
    with pytest.raises(UsageError) as caught:
        both(folder, a, b)
    for part in ("mine", "yours", "shape [2, 3] and [3, 2]", "a.safetensors"):
        assert part in str(caught.value)


def test_tied_weights_have_one_name_in_one_file_and_two_in_another(folder):
    one, two = {"in": np.ones(2)}, {"in": np.ones(2), "out": np.ones(2)}
    metadata = {"extra": json.dumps({"aliases": {"out": "in"}, "complex": []})}
    assert both(folder, two, one, metadata=metadata).equal_bits
    assert both(folder, one, one, metadata=metadata).equal_bits
    one["in"][1] = 2
    found = both(folder, two, one, metadata=metadata).tensors
    assert not found["in"].equal_bits
    assert not found["out"].equal_bits


def test_damaged_files_are_named(folder, tmp_path):
    good = tmp_path / "good"
    save_file({"w": np.ones(4)}, good)
    content = good.read_bytes()
    damages = [
        *(b"", b"abc", content[:20], content[:-8], b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"),
        *(content.replace(b"F64", b"F32"), content.replace(b"F64", b"X99")),
        content.replace(b"data_offsets", b"data_0ffsets"),
    ]
    for wrong in damages:
        bad = tmp_path / "bad"
        bad.write_bytes(wrong)
        with pytest.raises(UsageError, match="bad"):
            compare(good, bad)
    with pytest.raises(UsageError, match="no weights file"):
        compare(good, tmp_path / "missing")
    with pytest.raises(UsageError, match="is damaged"):
        compare(tmp_path, good)


def test_the_table_shows_the_farthest_first_and_brackets_as_they_are(folder, screen):
    a = {"near": np.array([1.0]), "[red]far": np.array([1.0]), "like": np.ones(1)}
    b = {"near": np.array([1.1]), "[red]far": np.array([2.0]), "like": np.ones(1)}
    print_comparison(both(folder, a, b), screen, tensors=True)
    text = screen.text
    assert "largest relative difference: 5.000e-01" in text
    assert "2 of 3 tensors differ" in text
    assert text.index("[red]far") < text.index("near") < text.index("like")
    assert "same bits" in text


def test_equal_weights_are_one_sentence(folder, screen):
    a = {"x": np.array([np.nan, np.inf]), "y": np.zeros(3, "f4")}
    found = both(folder, a, dict(reversed(a.items())), metadata={"format": "pt"})
    print_comparison(found, screen)
    assert screen.text == "the same bits in all of 2 tensors\n"
