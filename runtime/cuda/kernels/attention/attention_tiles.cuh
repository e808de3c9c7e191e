// Shared by the attention kernels on wgmma: places and descriptors of tiles in shared memory. Rows have SPAN bytes and are swizzled.
#pragma once

DEVICE u32 swizzled(u32 offset) { return offset ^ (((offset >> 7) & (SPAN / 16 - 1)) << 4); }
// Descriptor of an operand ``units`` of 16 bytes further. The upper word is unchanged: with 64-bit additions, products wait for carries.
DEVICE u64 later(u64 descriptor, u32 units) { return (descriptor >> 32 << 32) | (u32(descriptor) + units); }
// Descriptor of an MN-major operand: each key is a row of SPAN bytes, eight rows are one swizzle atom, subtiles are contiguous.
template <u32 SUBTILE_BYTES> DEVICE u64 value_descriptor(u32 address) {
    constexpr u64 swizzle = SPAN == 128 ? 1 : SPAN == 64 ? 2 : 3;
    return (swizzle << 62) | (u64((8 * SPAN) >> 4) << 32) | (u64(SUBTILE_BYTES >> 4) << 16) | u64((address & 0x3ffff) >> 4);
}
