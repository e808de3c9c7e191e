// Padding of 8-bit images by their zero point. Copies fill the taps outside of an image with zeros, so accumulators begin with what
// these taps would add: the zero point times their weights. Pixels at an edge differ only in which taps lie outside.
#pragma once

struct Edges {
    const u16* kinds;                              // of each pixel of an image: which taps lie outside; 0: none
    const int* sums;                               // [kinds from 1 on][channels]
    int channels;
};

// Which taps of a pixel lie outside; 0: none. ``at``: the pixel's place within its image.
template <class Params> DEVICE int edge_kind(const Params& p, int at) { return __ldg(p.edges.kinds + at); }

// What the taps outside add to the sum of a channel.
template <class Params> DEVICE int edge_sum(const Params& p, int kind, int channel) {
    return kind && channel < p.edges.channels ? __ldg(p.edges.sums + (kind - 1) * p.edges.channels + channel) : 0;
}
