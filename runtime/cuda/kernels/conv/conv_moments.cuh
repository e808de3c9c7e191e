// Norms of rows without a launch of their own. A product writes the moments of its result's rows (MOMENTS). The next product applies them
// to its accumulators (NORMED), or a later product to the residual that it adds (NORMED_RESIDUAL). Part of the Hopper convolution
// kernels, for 16-bit rows.
//
//   norm(x) W + b = rstd (x W' - mean s) + b'      W' = diag(scale) W, s: the column sums of W', b' = b + shift W
//   h W + b + norm(x) = h W + (rstd x - rstd mean) scale + b'      b' = b + shift
//
// A moment covers 64 channels of a row: their mean, and the sum of squared deviations from it. The layout is [64 channels][row], so that
// lanes read neighboring rows. NORMED and NORMED_RESIDUAL: 1 is a layer norm, 2 a norm by the mean square (its mean counts as zero).
//
// MOMENT_ROWS 8: a moment covers 64 channels of eight rows, and the layout is [64 channels][eight rows]. IMAGE_NORM: NORMED uses the
// moments of all channels of an image, whose rows are a multiple of eight: a group norm of one group, between products of each pixel.
#pragma once

#define ROW_NORM (NORMED ? NORMED : NORMED_RESIDUAL)
constexpr int MOMENT_CHANNELS = 64;
constexpr int FACTOR_WARPS = 3;                    // that compute row factors: with the loading warp, one per scheduler

#if MOMENTS
DEVICE void put_moments(const Params& p, int block, int row, float2 moments) {
    const int rows = p.pixel_count * (BATCHED ? p.tiles / p.batch_tiles : 1);
    p.moments[(long long)block * (rows / MOMENT_ROWS) + row / MOMENT_ROWS] = moments;
}

// Joint moments of two sets with ``count`` values each.
DEVICE float2 joint_moments(float2 a, float2 b, float count) {
    const float apart = b.x - a.x;
    return make_float2(a.x + 0.5f * apart, a.y + b.y + 0.5f * count * apart * apart);
}

// Approximate instructions of each thread where ``lanes`` threads share a row of 64 channels.
constexpr __device__ int moment_cost(int rows, int lanes) { return (rows * lanes + 127) / 128 * (264 / lanes + (lanes == 1 ? 0 : lanes == 2 ? 12 : 24)); }

// Writes the moments of a tile of 64 channels, in rows of 128 bytes with TMA's swizzle. All threads of a warpgroup take part; one to four
// share a row. ``before``: rows of the preceding products.
template <int ROWS>
DEVICE void tell_moments(const Params& p, u32 tile, int block, int first_row, int thread, int before) {
    constexpr int FEW = moment_cost(ROWS, 2) < moment_cost(ROWS, 1) ? 2 : 1;
    constexpr int LANES = moment_cost(ROWS, 4) < moment_cost(ROWS, FEW) ? 4 : FEW, CHUNKS = 8 / LANES;
    const int part = thread % LANES;
    #pragma unroll 1
    for (int begin = 0; begin < ROWS; begin += 128 / LANES) {
        const int row = begin + thread / LANES, from = min(row, ROWS - 1);
        uint4 v[CHUNKS];
        #pragma unroll
        for (int i = 0; i < CHUNKS; i++) v[i] = shared_load16(tile + from * 128 + (((part * CHUNKS + i) ^ (from & 7)) << 4));
        const float pivot = low_float(v[0].x);     // near the mean, where the mean is large
        float sum[2] = {0.0f, 0.0f}, squares[2] = {0.0f, 0.0f};
        #pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const float low = low_float(words[k]) - pivot, high = high_float(words[k]) - pivot;
                sum[0] += low, squares[0] += low * low;
                sum[1] += high, squares[1] += high * high;
            }
        }
        constexpr float COUNT = 8 * CHUNKS;
        const float total = sum[0] + sum[1];
        float2 moments = make_float2(pivot + total / COUNT, squares[0] + squares[1] - total * total / COUNT);
        #pragma unroll
        for (int apart = 1; apart < LANES; apart *= 2) {
            const float2 other = make_float2(__shfl_xor_sync(0xffffffffu, moments.x, apart), __shfl_xor_sync(0xffffffffu, moments.y, apart));
            moments = joint_moments(moments, other, COUNT * apart);
        }
        #pragma unroll
        for (int rows = 1; rows < MOMENT_ROWS; rows *= 2) {
            const int apart = rows * LANES;
            const float2 other = make_float2(__shfl_xor_sync(0xffffffffu, moments.x, apart), __shfl_xor_sync(0xffffffffu, moments.y, apart));
            moments = joint_moments(moments, other, float(MOMENT_CHANNELS * rows));
        }
        if (part == 0 && row % MOMENT_ROWS == 0 && row < ROWS && first_row + row < p.pixel_count) put_moments(p, block, before + first_row + row, moments);
    }
}

// The same where a warp stores 16 channels of eight rows from registers: a lane has four channels of one row. The warp's moments of its
// rows go to ``slot`` (eight float2), which all lanes have already read.
DEVICE void keep_moments(u32 slot, uint2 stored, int lane) {
    const float x[4] = {low_float(stored.x), high_float(stored.x), low_float(stored.y), high_float(stored.y)};
    const float mean = 0.25f * (x[0] + x[1] + x[2] + x[3]);
    float2 moments = make_float2(mean, 0.0f);
    #pragma unroll
    for (int i = 0; i < 4; i++) moments.y += (x[i] - mean) * (x[i] - mean);
    #pragma unroll
    for (int apart = 1; apart < 4 * MOMENT_ROWS; apart *= 2) {
        const float2 other = make_float2(__shfl_xor_sync(0xffffffffu, moments.x, apart), __shfl_xor_sync(0xffffffffu, moments.y, apart));
        moments = joint_moments(moments, other, 4.0f * apart);
    }
    if (lane % (4 * MOMENT_ROWS) == 0) {
        shared_store(slot + lane / 4 * 8, moments.x);
        shared_store(slot + lane / 4 * 8 + 4, moments.y);
    }
}
#endif

#if IMAGE_NORM
static_assert(NORMED == 1 && !NORMED_RESIDUAL, "images are normalized behind products of their rows");

// The factor of an image (rstd), and its product with the mean. Every warp computes the same values from the moments of all parts.
struct ImageFactor {
    int image = -1;
    float2 factor;

    __device__ __forceinline__ void take(const Params& p, int of, int lane) {
        if (of == image) return;
        constexpr int CHUNK = 8;
        const int parts = p.image_parts * p.given_blocks, pitch = p.pixel_count / 8;
        const float2* from = p.given + of * p.image_parts;
        const float pivot = __ldcg(&from->x);      // the means of all parts are close to it
        float sum = 0.0f, squares = 0.0f;
        int at = lane;                             // position in a block of channels
        #pragma unroll 1
        for (int begin = lane; begin < parts; begin += CHUNK * 32) {
            float2 part[CHUNK];
            #pragma unroll
            for (int i = 0; i < CHUNK; i++, at += 32) {
                while (at >= p.image_parts) at -= p.image_parts, from += pitch;
                part[i] = begin + i * 32 < parts ? __ldcg(from + at) : make_float2(pivot, 0.0f);
            }
            #pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                const float apart = part[i].x - pivot;
                sum += apart;
                squares += part[i].y + 8 * MOMENT_CHANNELS * apart * apart;
            }
        }
        #pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, apart);
            squares += __shfl_xor_sync(0xffffffffu, squares, apart);
        }
        const float each = 1.0f / parts, shift = sum * each;
        const float variance = fmaxf(squares * (each / (8 * MOMENT_CHANNELS)) - shift * shift, 0.0f);
        image = of, factor.x = rsqrtf(variance + p.epsilon), factor.y = factor.x * (pivot + shift);
    }
};

// Writes the factors of a tile's rows to shared memory; the tile may span several images. ``known``: the factor of the first image, if
// already computed.
template <int ROWS>
DEVICE void row_factors(const Params& p, u32 target, int first_row, int thread, ImageFactor& known) {
    const int image_rows = 8 * p.image_parts, end = min(first_row + ROWS, p.pixel_count);
    #pragma unroll 1
    for (int image = first_row / image_rows; image * image_rows < end; image++) {
        known.take(p, image, thread % 32);
        for (int row = thread; row < ROWS; row += FACTOR_WARPS * 32) {
            if ((first_row + row) / image_rows != image) continue;
            shared_store(target + row * 8, known.factor.x);
            shared_store(target + row * 8 + 4, known.factor.y);
        }
    }
}
#elif ROW_NORM
// Writes each row's factor, and its product with the row's mean, to shared memory (eight bytes a row). The loads of up to CHUNK parts of
// all rows of a thread are in flight together: in sequence they would take longer than the tile's products.
template <int ROWS>
DEVICE void row_factors(const Params& p, u32 target, int first_row, int thread) {
    constexpr int THREADS = FACTOR_WARPS * 32, PASSES = (ROWS + THREADS - 1) / THREADS, CHUNK = PASSES == 1 ? 16 : PASSES == 2 ? 12 : 8;
    float pivot[PASSES], sum[PASSES], squares[PASSES];
    #pragma unroll
    for (int pass = 0; pass < PASSES; pass++) pivot[pass] = sum[pass] = squares[pass] = 0.0f;
    #pragma unroll 1
    for (int begin = 0; begin < p.given_blocks; begin += CHUNK) {
        float2 part[PASSES][CHUNK];
        #pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int row = pass * THREADS + thread;
            const float2* from = p.given + (long long)begin * p.pixel_count + min(first_row + row, p.pixel_count - 1);
            #pragma unroll
            for (int i = 0; i < CHUNK; i++)
                part[pass][i] = row < ROWS && begin + i < p.given_blocks ? __ldcg(from + (long long)i * p.pixel_count) : make_float2(0.0f, 0.0f);
        }
        #pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            if (begin == 0) pivot[pass] = part[pass][0].x;     // the means of a row's parts are close to this one
            #pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                const float apart = begin + i < p.given_blocks ? part[pass][i].x - pivot[pass] : 0.0f;
                sum[pass] += apart;
                squares[pass] += part[pass][i].y + MOMENT_CHANNELS * apart * apart;
            }
        }
    }
    #pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        const int row = pass * THREADS + thread;
        const float each = 1.0f / p.given_blocks, shift = sum[pass] * each, mean = pivot[pass] + shift;
        const float variance = fmaxf(squares[pass] * (each / MOMENT_CHANNELS) - shift * shift, 0.0f);
        const float factor = rsqrtf(variance + (ROW_NORM == 2 ? mean * mean : 0.0f) + p.epsilon);
        if (row < ROWS) {
            shared_store(target + row * 8, factor);
            shared_store(target + row * 8 + 4, ROW_NORM == 2 ? 0.0f : factor * mean);
        }
    }
}
#endif

#if NORMED
// Applies the row factors (rows are wgmma's columns) to accumulators of this warp's channels. ``columns``: the channels' column sums of W'.
template <int M_TILES, int SUMS>
DEVICE void normalize(float (&sum)[M_TILES][SUMS], u32 factors, const float (&columns)[M_TILES][2], int lane) {
    #pragma unroll
    for (int j = 0; j < SUMS / 4; j++) {
        float4 f;                                  // of two rows
        shared_load(factors + (j * 8 + lane % 4 * 2) * 8, f);
        #pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            float* v = &sum[m][j * 4];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                v[2 * i] = NORMED == 2 ? v[2 * i] * f.x : v[2 * i] * f.x - f.y * columns[m][i];
                v[2 * i + 1] = NORMED == 2 ? v[2 * i + 1] * f.z : v[2 * i + 1] * f.z - f.w * columns[m][i];
            }
        }
    }
}
#endif

// How a thread adds its elements of the residual: two channels of two or four pixels.
struct AsTheyAre {
    __device__ __forceinline__ float operator()(float r, int pixel, int channel) const { return r; }
};

DEVICE float normalized(float r, float factor, float factor_of_mean, float scale) { return (r * factor - factor_of_mean) * scale; }

template <int PIXELS> struct Normalized {
    float4 factors[PIXELS / 2];                    // of two pixels each
    float scale[2];

    // ``from``: the factors of the thread's first two pixels, of a block of eight.
    __device__ __forceinline__ Normalized(u32 from, const float (&scales)[2]) : scale{scales[0], scales[1]} {
        #pragma unroll
        for (int i = 0; i < PIXELS / 2; i++) shared_load(from + i * 64, factors[i]);
    }
    __device__ __forceinline__ float operator()(float r, int pixel, int channel) const {
        const float4 f = factors[pixel / 2];
        return pixel % 2 ? normalized(r, f.z, f.w, scale[channel]) : normalized(r, f.x, f.y, scale[channel]);
    }
};

template <int PIXELS>
DEVICE auto added_residual(u32 factors, const float (&scales)[2]) {
    if constexpr (NORMED_RESIDUAL > 0) return Normalized<PIXELS>(factors, scales);
    else return AsTheyAre();
}
