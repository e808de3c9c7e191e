// Shared by the attention kernels on mma.sync: the first parameters, and the keys that a block sees. Included after generated.cuh.
#pragma once

struct View {                                      // strides in elements
    long long batch, head;
    int position;
};

template <class Number, class Result> struct Operands {
    const Number *queries, *keys, *values;
    Result* output;
    const Number* mask;
    const int* lengths;                            // number of keys of each batch entry
    View of_queries, of_keys, of_values, of_output;
    long long mask_batch, mask_head, mask_query;   // strides in elements
    int query_count, key_count, features, value_features, group;   // group: query heads per key head
    int causal_offset;                             // query i sees keys <= i + causal_offset
    int reach;                                     // with a window, query i sees keys >= i + causal_offset - reach
    int mask_period;                               // batch entry n has mask n % mask_period
};

DEVICE float infinity() { return __int_as_float(0x7f800000); }

// The keys that a block of queries from ``first`` on sees, and the keys that a warp's ``rows`` from ``own`` on see.
struct Seen {
    int key_count, own_last;                       // number of keys of the batch entry; end of the warp's keys
    int offset;                                    // query i sees keys up to i + offset, with causal order
    int begin, tiles;                              // tiles of keys
    template <class Parameters> __device__ __forceinline__ Seen(const Parameters& p, int batch, int first, int queries, int own, int rows) {
        key_count = p.key_count;
        if (HAS_LENGTHS) key_count = min(key_count, max(p.lengths[batch], 0));
        int last = key_count;
        own_last = own < p.query_count ? key_count : 0;
        offset = p.causal_offset + (FROM_END ? key_count - p.query_count : 0);
        if (CAUSAL) {
            last = max(0, min(last, first + queries + offset));
            own_last = min(own_last, own + rows + offset);
        }
        begin = WINDOW ? max(0, first + offset - p.reach) / BLOCK_KEYS : 0;
        tiles = max(0, (last + BLOCK_KEYS - 1) / BLOCK_KEYS - begin);
    }
};
