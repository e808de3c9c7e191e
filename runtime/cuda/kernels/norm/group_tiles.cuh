// Tiles of images whose groups of channels are normalized: slabs of channels (whole groups, whole vectors) of a part of the pixels.
#pragma once
#include "group_sums.cuh"

struct Tiling {
    int pixels, channels, slab, group, tiles;      // slab: channels per block, group: channels per group
    int kept;                                      // from this block on, group_moments leaves its reads in L2
    int pitch;                                     // elements between consecutive pixels of the input
    int added_pitch;                               // elements between the vectors of `added` of consecutive images
};

// The work of a block. The slabs of a tile are consecutive blocks, and are neighbors in memory.
struct Place {
    int image, tile, first_channel, vector, line, lines, from, to;
    bool live;                                     // threads beyond lines * vectors only help to reduce

    __device__ __forceinline__ Place(const Tiling& t, int block) {
        const int slabs = t.channels / t.slab, vectors = t.slab / LANES;
        first_channel = block % slabs * t.slab;
        tile = block / slabs % t.tiles;
        image = block / slabs / t.tiles;
        lines = THREADS / vectors;
        vector = threadIdx.x % vectors;
        line = threadIdx.x / vectors;
        live = line < lines;
        from = tile_begin(t.pixels, tile, t.tiles);
        to = tile_begin(t.pixels, tile + 1, t.tiles);
    }
    // Offset of the slab's first channel at a pixel, for a tensor with this pitch.
    __device__ __forceinline__ long long at(const Tiling& t, int pixel, int pitch) const {
        return ((long long)image * t.pixels + pixel) * pitch + first_channel;
    }
    // The addend of a channel of the slab.
    __device__ __forceinline__ float added_to(const Element* added, const Tiling& t, int channel) const {
        return ADDED ? element_of(added + (long long)image * t.added_pitch + first_channel + channel) : 0.0f;
    }
};
