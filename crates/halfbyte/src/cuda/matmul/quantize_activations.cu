// Rows of activations as codes of 8 bits, with a scale (and an offset) for each group of columns: what wNa8 products multiply.
//
//   some threads own a group of a row (a warp, or a block where groups are long)
//   least and greatest element -> scale, offset -> codes, and their sum
//
// The rule is that of quantize/activations.rs, bit for bit: every operation is f32, rounded once, in the same order.
// Codes of 16 columns lie in the order of the A fragments that packed weights give (matmul/wna8_sm90.cu): columns
// 2t, 2t + 8, 2t + 1, 2t + 9 in bytes 4t .. 4t + 3.
#include "floats.cuh"

// As `Params` in quantize_activations.rs.
struct Params {
    const void* x;         // [m][k]
    const u32* order;      // [k]: the column that each place is for, or null
    signed char* codes;    // [m][pitch]: pitch a multiple of 128, zeros from k on
    float* scales;         // of row r and group g: at g * group_pitch + r
    float* sums;           // of codes, likewise; or null
    float* offsets;        // likewise, where there are any
    u64 k, pitch, group_pitch;
    u32 group, groups;
    FloatType x_type;
    u32 padding;
};

constexpr float LEAST_RANGE = 7.8886090522101181e-31f;   // 2^-100

// Least and greatest, and whether all are finite, over the threads of a group.
struct Range { float low, high; bool finite; };

DEV Range joined(Range a, Range b) { return {fminf(a.low, b.low), fmaxf(a.high, b.high), a.finite && b.finite}; }

DEV Range warp_range(Range r) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const Range other = {__shfl_xor_sync(ALL_LANES, r.low, distance), __shfl_xor_sync(ALL_LANES, r.high, distance),
                             bool(__shfl_xor_sync(ALL_LANES, int(r.finite), distance))};
        r = joined(r, other);
    }
    return r;
}

// What takes x to its code.
struct Rule { float scale, offset, base, inverse, shift; };

DEV Rule symmetric(Range r) {
    const float magnitude = fmaxf(fmaxf(r.high, -r.low), 0.f);
    if (!r.finite) return {__uint_as_float(0x7fc00000), 0.f, 0.f, 0.f, 0.f};
    if (magnitude < LEAST_RANGE) return {0.f, 0.f, 0.f, 0.f, 0.f};
    return {__fdiv_rn(magnitude, 127.f), 0.f, 0.f, __fdiv_rn(127.f, magnitude), 0.f};
}

DEV Rule asymmetric(Range r) {
    const float range = __fsub_rn(r.high, r.low);
    if (!r.finite || !(fabsf(range) < __uint_as_float(0x7f800000))) return {__uint_as_float(0x7fc00000), 0.f, 0.f, 0.f, 0.f};
    if (range < LEAST_RANGE) return {0.f, r.low, 0.f, 0.f, 0.f};
    const float scale = __fdiv_rn(range, 255.f);
    return {scale, __fadd_rn(r.low, __fmul_rn(128.f, scale)), r.low, __fdiv_rn(255.f, range), 128.f};
}

// A conversion to an integer takes NaN to 0 and cuts off what is out of range.
DEV int code_of(float x, const Rule& rule) {
    const float code = __fsub_rn(rintf(__fmul_rn(__fsub_rn(x, rule.base), rule.inverse)), rule.shift);
    return max(-128, min(127, __float2int_rn(code)));
}

// Where column c of 16 lies.
DEV u32 place(u32 c) { return (c % 8 / 2) * 4 + c % 2 * 2 + c / 8; }

// THREADS: of a group. A block has as many groups of one row as it has room for.
template <int THREADS, bool OFFSET>
__global__ void __launch_bounds__(256) quantize_activations(const Params p) {
    constexpr int AT_ONCE = 256 / THREADS, WARPS = THREADS / 32;
    __shared__ float lows[8], highs[8];
    __shared__ int finites[8], totals[8];
    const u32 thread = threadIdx.x % THREADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 row = blockIdx.x, group = blockIdx.y * AT_ONCE + threadIdx.x / THREADS;
    const bool there = group < p.groups;
    const u64 first = there ? u64(group) * p.group : 0, end = there ? min(first + p.group, p.k) : 0;
    const u64 from = row * p.k;

    Range range = {__uint_as_float(0x7f800000), __uint_as_float(0xff800000), true};
    for (u64 c = first + thread; c < end; c += THREADS) {
        const float v = load_float(p.x, from + (p.order ? p.order[c] : c), p.x_type);
        range = joined(range, {v, v, fabsf(v) < __uint_as_float(0x7f800000)});
    }
    range = warp_range(range);
    if constexpr (WARPS > 1) {
        if (lane == 0) lows[warp] = range.low, highs[warp] = range.high, finites[warp] = range.finite;
        __syncthreads();
        range = {lows[0], highs[0], bool(finites[0])};
#pragma unroll
        for (int w = 1; w < WARPS; w++) range = joined(range, {lows[w], highs[w], bool(finites[w])});
    }
    const Rule rule = OFFSET ? asymmetric(range) : symmetric(range);

    int sum = 0;
    // The last group fills the row up.
    const u64 filled = group + 1 == p.groups ? p.pitch : end;
    for (u64 c = first + thread; there && c < filled; c += THREADS) {
        int code = 0;
        if (c < end) code = code_of(load_float(p.x, from + (p.order ? p.order[c] : c), p.x_type), rule);
        p.codes[row * p.pitch + (c & ~u64(15)) + place(c & 15)] = static_cast<signed char>(code);
        sum += code;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if constexpr (WARPS > 1) {
        if (lane == 0) totals[warp] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += totals[w];
    }
    if (there && thread == 0) {
        const u64 at = group * p.group_pitch + row;
        p.scales[at] = rule.scale;
        if (p.sums) p.sums[at] = float(sum);
        if (OFFSET) p.offsets[at] = rule.offset;
    }
}
