// out = silu(gate) * up, with silu(x) = x / (1 + e^-x); a row of gate_up has the gate first, then up.
#include "floats.cuh"

constexpr int THREADS = 256;

// As `Params` in swiglu.rs.
struct Params {
    const float* gate_up;   // [rows][2][inner]
    void* out;              // [rows][inner]
    u64 inner, elements;
    FloatType out_type;
};

__global__ void __launch_bounds__(THREADS) swiglu(const Params p) {
    const u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= p.elements) return;
    const float* row = p.gate_up + i / p.inner * 2 * p.inner;
    const float gate = row[i % p.inner], up = row[i % p.inner + p.inner];
    store_float(p.out, i, gate / (1 + expf(-gate)) * up, p.out_type);
}
