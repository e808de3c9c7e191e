// Pixels at the edges of an image among the columns of wgmma: see conv_edges.cuh.
#pragma once

// Calls begin(j, e, kind) for the pixels of a thread of wgmma: column 8 j + lane % 4 * 2 + e of COLUMNS. place_of(column): the pixel's place
// within its image, or -1.
template <int COLUMNS, class PlaceOf, class Begin>
DEVICE void begin_at_edges(const Params& p, int lane, const PlaceOf& place_of, const Begin& begin) {
    const auto kind_of = [&](int column) {
        const int place = column < COLUMNS ? place_of(column) : -1;
        return place < 0 ? 0 : edge_kind(p, place);
    };
#if DIRECT                                         // one tile per block: what one column waits for does not hold up the next
    #pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) begin(i / 2, i % 2, kind_of(i / 2 * 8 + lane % 4 * 2 + i % 2));
#else
    // Fewer instructions: each lane looks up one column of 32, and most groups of eight have no pixel at an edge.
    #pragma unroll
    for (int first = 0; first < COLUMNS; first += 32) {
        const int kind = kind_of(first + lane);
        const u32 some = __ballot_sync(0xffffffffu, kind != 0);
        #pragma unroll
        for (int j = first / 8; j < first / 8 + 4 && j < COLUMNS / 8; j++) {
            #pragma unroll
            for (int e = 0; e < 2; e++) begin(j, e, 0);
            if (!(some >> (j % 4 * 8) & 255)) continue;
            #pragma unroll
            for (int e = 0; e < 2; e++) begin(j, e, __shfl_sync(0xffffffffu, kind, j % 4 * 8 + lane % 4 * 2 + e));
        }
    }
#endif
}
