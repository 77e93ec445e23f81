// A kernel for each case: a thread has a word, of which the conversion makes registers.
#define CASE(name, registers, ...)                                                                        \
  extern "C" __global__ void name(const unsigned* words, unsigned* outs, unsigned count, unsigned zero) { \
    using namespace halfbyte;                                                                             \
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;                                             \
    if (i >= count) return;                                                                               \
    const unsigned word = words[i];                                                                       \
    unsigned out[registers];                                                                              \
    __VA_ARGS__;                                                                                          \
    for (int j = 0; j < registers; j++) outs[registers * i + j] = out[j];                                 \
  }
