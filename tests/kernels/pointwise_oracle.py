"""The definitions that the pointwise kernels are held to, in plain torch, and awkward inputs.

Import this module before any kernel: see interpreter.py.
"""

import torch

from tests.kernels.interpreter import DEVICE

__all__ = ["DEVICE"]
FLOOR = 2.0**-100
BF16 = torch.bfloat16


def scale_of(amax, largest):
    """The scale of groups from their amax (FP32)."""
    scale = amax.clamp_min(FLOOR) / largest
    return torch.where(amax.isfinite(), scale, torch.full_like(scale, float("nan")))


def e4m3_bytes(x, scale):
    """Codes as uint8; NaN is 0x7F."""
    q = x / scale
    codes = q.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(q.isnan(), torch.full_like(codes, 0x7F), codes)


def int8_codes(x, scale):
    q = x / scale
    return torch.where(q.isnan(), 0.0, q.clamp(-127.0, 127.0).round()).to(torch.int8)


def pad_to(x, rows, columns):
    """`x` [R, C] extended with zeros to multiples of (rows, columns)."""
    R, C = x.shape
    return torch.nn.functional.pad(x, (0, -C % columns, 0, -R % rows))


def blocks(x_TK):
    """(bytes [T, Kp], scales [T, G]) of 1x128 groups."""
    x = pad_to(x_TK.float().cpu(), 1, 128)
    grouped = x.reshape(x.shape[0], -1, 128)
    scale = scale_of(grouped.abs().amax(-1), 448.0)
    codes = e4m3_bytes(grouped, scale[..., None]).reshape(x.shape)
    return codes, scale


def weight_blocks(w_NK):
    """(bytes [Np, Kp], scales [Np/128, Kp/128]) of 128x128 blocks."""
    w = pad_to(w_NK.float().cpu(), 128, 128)
    tiles = w.reshape(w.shape[0] // 128, 128, -1, 128)
    scale = scale_of(tiles.abs().amax((1, 3)), 448.0)
    return e4m3_bytes(tiles, scale[:, None, :, None]).reshape(w.shape), scale


def token_blocks(x_TN, table):
    """(bytes [Np, 128*groups], scales [groups, N]) along tokens, transposed, of FP32 values."""
    x = x_TN.float().cpu()
    codes, scales = [], []
    for first, rows in table.tolist():
        group = x[first : first + rows]
        scale = scale_of(group.abs().amax(0), 448.0)
        codes.append(pad_to(e4m3_bytes(group, scale), 128, 1).t())
        scales.append(scale)
    return pad_to(torch.cat(codes, 1), 128, 1), torch.stack(scales)


def rescaled_blocks(codes_TK, scale_TG, table):
    """(bytes [Kp, 128*groups], scales [groups, G]) of saved codes under each block's largest scale."""
    codes, scale = codes_TK.cpu().float(), scale_TG.cpu()
    parts, scales = [], []
    for first, rows in table.tolist():
        own = scale[first : first + rows]
        largest = own.amax(0)
        ratio = (own / largest).repeat_interleave(128, 1)
        moved = e4m3_bytes(codes[first : first + rows] * ratio, torch.ones(1))
        parts.append(pad_to(moved, 128, 1).t())
        scales.append(largest)
    return torch.cat(parts, 1), torch.stack(scales)


def rows_of(x_RK, largest):
    """(codes [R, Kp] bytes or int8, scales [R]) with one scale per row."""
    x = x_RK.float().cpu()
    scale = scale_of(x.abs().amax(-1), largest)
    encode = int8_codes if largest == 127.0 else e4m3_bytes
    return encode(pad_to(x, 1, 128), scale[:, None]), scale


def same_bits(a, b):
    """Bitwise equality of values (NaN equals NaN)."""
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    if a.dtype.is_floating_point and a.element_size() > 1:
        view = torch.int32 if a.element_size() == 4 else torch.int16
        both = a.isnan() & b.isnan()
        return bool(((a.contiguous().view(view) == b.contiguous().view(view)) | both).all())
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def awkward(T, K, dtype=BF16, seed=0):
    """Random values with zero rows, subnormals, ties, outliers, tiny groups, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator)
    x[:, ::7] *= 40.0
    row = iter(range(T))
    special = [
        lambda r: r.zero_(),
        lambda r: r.mul_(1e-38),
        lambda r: r.mul_(2.0**-125),
        lambda r: r.mul_(1e36),
        lambda r: r.mul_(2.0**-90),
        lambda r: r.copy_(torch.arange(K) % 35 / 2.0),
        lambda r: r.copy_((torch.arange(K) % 128) * 3.5),
        lambda r: r[3].fill_(float("nan")),
        lambda r: r[K // 2].fill_(float("inf")),
        lambda r: r[-1].fill_(-float("inf")),
        lambda r: r.copy_(-torch.zeros(K)),
        lambda r: r.mul_(2.0**-60),
    ]
    for change, r in zip(special, row, strict=False):
        change(x[r])
    return x.to(dtype).to(DEVICE)
