/*
 * The C interface of halfbyte: weights of neural networks in 2 to 8 bits, times half and float activations, on CPUs and NVIDIA GPUs.
 *
 * Made from crates/halfbyte-c by `cargo xtask c-header`: change it there. docs/guide-c.md is the guide.
 *
 * Status. Calls that can fail return a status; where it is not HALFBYTE_STATUS_OK, halfbyte_last_error() has the words, and nothing
 * was made: `*out` is null, tensors have what they had or a part of the result.
 *
 * Handles. What a function makes is freed by the caller, once, with the function of its name; null is freed as nothing. A handle may
 * be used by many threads at once, but not while it is freed. Layers, weights and models go on when what they were made of is freed.
 *
 * Pointers. Null is refused where a function needs something, and allowed where its text says so. What is not null points to what its
 * type says: nobody can look that up. Texts end with a zero byte and are UTF-8.
 *
 * Tensors. DLPack's DLTensor, by pointer: row-major without gaps (strides null or those of such a tensor, byte_offset counted), 0 to 32
 * dimensions, of f16, bf16, f32, or i8, u8, i32 where a function says so, in memory of the host or of CUDA. Tensors are borrowed for the
 * call; those in memory of a GPU until the work in its stream is done. A tensor that is written shares no memory with one that is read.
 *
 * Processes. A process that was forked from one that has called the library calls nothing of it before exec, freeing included: its
 * threads are not there, and a call may wait for them without end.
 *
 * Files that are open are mapped into memory: truncating one meanwhile ends the program (SIGBUS). Replace files by renaming.
 *
 * No function throws, unwinds or ends the program, whatever it is given within these rules, but for memory that is short: large buffers
 * answer HALFBYTE_STATUS_OUT_OF_MEMORY, for small ones the program ends.
 */

#ifndef HALFBYTE_H
#define HALFBYTE_H

#include <stddef.h>
#include <stdint.h>
#include "halfbyte/dlpack.h"

// The version of this interface, which changes only when something that was there breaks. What the library was built with is
// `halfbyte_abi_version()`.
#define HALFBYTE_ABI_VERSION 1

// Activations as they are: f16 or bf16 by habit, any float type is taken.
#define HALFBYTE_ACT_A16 0

// Activations as they are: f32 by habit, any float type is taken.
#define HALFBYTE_ACT_A32 1

// Activations quantised on the fly to 8 bits, symmetric.
#define HALFBYTE_ACT_A8 2

// Activations quantised on the fly to 8 bits, with scale and offset.
#define HALFBYTE_ACT_A8_ASYM 3

// Scales from the largest magnitude of each group, so that both extremes are met exactly.
#define HALFBYTE_RTN_DEFAULT 0

// Scales such that every code is used; of symmetric formats alone, others are refused.
#define HALFBYTE_RTN_FULL_RANGE 1

// Scales by a search for the least squared error of each group.
#define HALFBYTE_RTN_SEARCH 2

// Results as they are.
#define HALFBYTE_ACTIVATION_NONE 0

// max(v, 0).
#define HALFBYTE_ACTIVATION_RELU 1

// min(max(v, 0), 6).
#define HALFBYTE_ACTIVATION_RELU6 2

// v Phi(v), with the error function.
#define HALFBYTE_ACTIVATION_GELU 3

// Its approximation by the hyperbolic tangent.
#define HALFBYTE_ACTIVATION_GELU_TANH 4

// v / (1 + exp(-v)).
#define HALFBYTE_ACTIVATION_SILU 5

// Images plane by plane: [batch, channels, h, w].
#define HALFBYTE_LAYOUT_NCHW 0

// Images pixel by pixel: [batch, h, w, channels].
#define HALFBYTE_LAYOUT_NHWC 1

// As many tokens as were asked for.
#define HALFBYTE_FINISH_LENGTH 0

// The model ended its text.
#define HALFBYTE_FINISH_END 1

// A stop text came.
#define HALFBYTE_FINISH_STOP 2

// The context is full.
#define HALFBYTE_FINISH_CONTEXT 3

// The callback said so.
#define HALFBYTE_FINISH_CANCELLED 4

// What a call answers. `halfbyte_last_error()` has the words.
typedef enum {
  // It is done.
  HALFBYTE_STATUS_OK = 0,
  // An argument does not fit: a null pointer, a shape, a type, a device, a name. Change the call.
  HALFBYTE_STATUS_INVALID_ARGUMENT = 1,
  // A file or numbers are not what they must be: malformed, missing, NaN. Change the data.
  HALFBYTE_STATUS_BAD_INPUT = 2,
  // The system refuses an operation on a file.
  HALFBYTE_STATUS_IO = 3,
  // It is well-formed, but no kernel serves it, or this version does not read it.
  HALFBYTE_STATUS_UNSUPPORTED = 4,
  // A device, its driver, a library that it needs or a thread is not to be had.
  HALFBYTE_STATUS_DEVICE = 5,
  // Memory is short.
  HALFBYTE_STATUS_OUT_OF_MEMORY = 6,
  // A fault has ended all work of this process on a GPU.
  HALFBYTE_STATUS_DEVICE_LOST = 7,
  // A fault of this library. Please tell its authors.
  HALFBYTE_STATUS_INTERNAL = 8,
} halfbyte_status;

// A model folder or a file of tensors, open: safetensors, GGUF, ONNX, PyTorch.
typedef struct halfbyte_checkpoint halfbyte_checkpoint;

// y = activation(conv(x, W) + bias), with W packed for the kernels of a device.
typedef struct halfbyte_conv2d halfbyte_conv2d;

// The same of convolutions: to the bit as onnxruntime's QLinearConv.
typedef struct halfbyte_conv2d_int8 halfbyte_conv2d_int8;

// What layers are made for and run on: a CPU with a team of threads, or a GPU with a queue of work.
typedef struct halfbyte_device halfbyte_device;

// y = activation(x W^T + bias), with W packed for the kernels of a device.
typedef struct halfbyte_linear halfbyte_linear;

// Bytes in, bytes or floats out: sums exact in int32, rounded once. To the bit as onnxruntime's QLinearMatMul.
typedef struct halfbyte_linear_int8 halfbyte_linear_int8;

// A language model with its tokenizer, on a device.
typedef struct halfbyte_model halfbyte_model;

// A weight [n, k] as it is given to layers: codes with scales, or floats; with the bias that a checkpoint has beside it.
typedef struct halfbyte_weight halfbyte_weight;

// What a convolution's layer fixes.
typedef struct {
  // Input channels.
  size_t ci;
  // Output channels.
  size_t co;
  // Rows and columns of the kernel.
  size_t kernel[2];
  // Pixels from one output to the next, down and across.
  size_t stride[2];
  // Pixels of zeros above, left of, below and right of the input.
  size_t padding[4];
  // Pixels from one position of the kernel to the next, down and across.
  size_t dilation[2];
  // Groups of channels.
  size_t groups;
} halfbyte_conv2d_geometry;

// What a tensor's bytes stand for: scale * (code - zero).
typedef struct {
  // 1: bytes are signed; 0: they are not.
  int32_t is_signed;
  // What one step of the codes stands for, finite and above 0.
  float scale;
  // The code of 0.
  int32_t zero;
} halfbyte_affine;

// A weight of bytes and what becomes of its sums: what the two kinds of layers have in common.
typedef struct {
  // i8 or u8 of the host: [n, k]; of a convolution [co, ci / groups, kh, kw].
  const DLTensor *codes;
  // Floats of the host: [n], or one for all.
  const DLTensor *scales;
  // i32 of the host: [n], or one for all; null: all are 0.
  const DLTensor *zeros;
  // What the bytes of x stand for.
  halfbyte_affine x;
  // What the bytes of y stand for; null: y is floats.
  const halfbyte_affine *y;
  // i32 [n] of the host, in steps of the scale of x times that of the weight; or null.
  const DLTensor *bias;
  // Floats [n] of the host, for outputs in floats; or null.
  const DLTensor *float_bias;
  // HALFBYTE_ACTIVATION_*; for outputs in bytes one that is a clamp.
  int32_t activation;
} halfbyte_int8_layer;

// What to write, and when to stop. halfbyte_generation_options_default() fills it.
typedef struct {
  // Bytes of this struct, as the program was compiled with: later versions may have more fields, and take this one's too.
  size_t struct_size;
  // At most this many new tokens.
  size_t max_tokens;
  // Logits are divided by this; 0 takes the most likely token.
  float temperature;
  // Draw from the fewest most likely tokens whose probabilities reach this sum; 1 for no limit.
  float top_p;
  // Draw from tokens at least this part as likely as the most likely one; 0 for no limit.
  float min_p;
  // Logits of tokens that the text holds are divided by this, or multiplied where they are negative; 1 changes nothing.
  float repetition_penalty;
  // Subtracted from a token's logit for each time that it was written; 0 changes nothing.
  float frequency_penalty;
  // Subtracted from the logits of tokens that were written at all; 0 changes nothing.
  float presence_penalty;
  // Draw from this many of the most likely tokens; 0 for no limit.
  size_t top_k;
  // Same seed, same text.
  uint64_t seed;
  // Texts that end the text, and are not shown, of 1 to 1024 bytes each; null if there are none.
  const char *const *stop;
  // How many.
  size_t stop_count;
  // Other than 0: tokens that end a text do not end this one.
  int32_t ignore_end;
} halfbyte_generation_options;

// Is told each piece of text as it comes: `text`, `length` bytes of UTF-8 in whole characters with a zero behind them, which stays for
// the call only. `token`: its number, or -1 for text that was held back until the end; the text may be empty, where a token is a part of
// a character or may begin a stop text. Returns 0 to go on, anything else to stop. It must not throw, nor jump out.
typedef int32_t (*halfbyte_text_callback)(void *user_data, int64_t token, const char *text, size_t length);

// What was written.
typedef struct {
  // Tokens of the prompt.
  size_t prompt_tokens;
  // New tokens.
  size_t new_tokens;
  // Why it stopped, HALFBYTE_FINISH_*.
  int32_t finish;
  // Time for the prompt.
  double prefill_seconds;
  // Time for what followed.
  double decode_seconds;
} halfbyte_generation;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the interface that the library has: a program compares it with HALFBYTE_ABI_VERSION of its header.
uint32_t halfbyte_abi_version(void);

// The version of the library, as "0.1.0".
const char *halfbyte_version(void);

// What the last call of this thread that failed said, in UTF-8; "" if none has. It stays until another call of this thread fails, or
// the thread ends.
const char *halfbyte_last_error(void);

// The name of a status, as "invalid argument"; of a number that is none, "unknown status".
const char *halfbyte_status_name(int32_t status);

// Opens the CPU with a team of `threads` threads; 0: as many as the system offers to this process. Work of one device is done by one
// call at a time; calls of others wait.
halfbyte_status halfbyte_device_cpu(size_t threads,
                                    halfbyte_device **out);

// Opens GPU `index` of those that the process may see, in its primary context, which the CUDA runtime uses too, with a new stream that
// does not wait for the default stream.
halfbyte_status halfbyte_device_cuda(uint32_t index,
                                     halfbyte_device **out);

// The GPU of `device` with a stream of the caller's, a `cudaStream_t` or `CUstream` of the GPU's primary context; null is the default
// stream. It must stay open until the new device is freed. Kernels that were loaded for `device` serve the new one too, and layers that
// were made with one run on the other. Opening one is cheap, so that a program may have one for each of its streams; each has memory
// that its products work in.
halfbyte_status halfbyte_device_with_stream(const halfbyte_device *device,
                                            void *stream,
                                            halfbyte_device **out);

// Writes to `out` how many GPUs the process may see; 0 also without a driver.
halfbyte_status halfbyte_cuda_count(size_t *out);

// Waits for all work in the device's queue; on a CPU there is none to wait for. What failed on a GPU since the last wait is told here.
halfbyte_status halfbyte_device_synchronize(const halfbyte_device *device);

// Frees a device; null is nothing. Layers that were made for it go on.
void halfbyte_device_free(halfbyte_device *device);

// Opens a model folder in Hugging Face's form, or one file of tensors. `path`: in UTF-8.
halfbyte_status halfbyte_checkpoint_open(const char *path, halfbyte_checkpoint **out);

// How many layers it holds whose weight is a matrix of floats (embeddings among them) or quantised; 0 of null.
size_t halfbyte_checkpoint_layers(const halfbyte_checkpoint *checkpoint);

// The name of one of them, in the order of the files; null of null, and of a number that is none. It stays as long as the checkpoint is
// open.
const char *halfbyte_checkpoint_layer(const halfbyte_checkpoint *checkpoint,
                                      size_t index);

// Writes to `out` 1 if the layer `name` is quantised, 0 if it is dense. A name that is none is HALFBYTE_STATUS_INVALID_ARGUMENT.
halfbyte_status halfbyte_checkpoint_is_quantized(const halfbyte_checkpoint *checkpoint,
                                                 const char *name,
                                                 int32_t *out);

// Closes a checkpoint; null is nothing. Layers and weights out of it go on.
void halfbyte_checkpoint_free(halfbyte_checkpoint *checkpoint);

// Quantises a matrix by rounding to nearest. `w`: floats [n, k] of the host; `format`: as "w4a16-g128", "w8a8", "w4a8-g32-asym";
// `flags`: a sum of HALFBYTE_RTN_*.
halfbyte_status halfbyte_weight_rtn(const DLTensor *w,
                                    const char *format,
                                    uint32_t flags,
                                    halfbyte_weight **out);

// The same of a convolution's weight. `w`: floats [co, ci / groups, kh, kw] of the host; scales lie along the channels of a position.
halfbyte_status halfbyte_weight_rtn_conv2d(const DLTensor *w,
                                           const halfbyte_conv2d_geometry *geometry,
                                           const char *format,
                                           uint32_t flags,
                                           halfbyte_weight **out);

// Copies floats [n, k] of the host, to be multiplied exactly.
halfbyte_status halfbyte_weight_dense(const DLTensor *w, halfbyte_weight **out);

// Reads a linear layer's weight, and its bias if there is one, out of a checkpoint by the layer's name, as
// "model.layers.0.self_attn.q_proj". `act`: what becomes of the activations of quantised layers, HALFBYTE_ACT_*.
halfbyte_status halfbyte_weight_load(const halfbyte_checkpoint *checkpoint,
                                     const char *name,
                                     int32_t act,
                                     halfbyte_weight **out);

// Outputs; 0 of null.
size_t halfbyte_weight_n(const halfbyte_weight *weight);

// Length of the reduction; 0 of null.
size_t halfbyte_weight_k(const halfbyte_weight *weight);

// Its format, as "w4a16-g128" or, dense, "f16"; null of null. It stays as long as the weight.
const char *halfbyte_weight_format(const halfbyte_weight *weight);

// Writes what the weight stands for to `out`: f32 [n, k] of the host, each number rounded once.
halfbyte_status halfbyte_weight_dequantize(const halfbyte_weight *weight, const DLTensor *out);

// Frees a weight; null is nothing. Layers that were made of it go on.
void halfbyte_weight_free(halfbyte_weight *weight);

// Packs a weight for a device. `bias`: floats [n] of the host; null: that of the weight's checkpoint, if it came out of one and there is
// one, else none. `activation`: HALFBYTE_ACTIVATION_*.
halfbyte_status halfbyte_linear_create(const halfbyte_device *device,
                                       const halfbyte_weight *weight,
                                       const DLTensor *bias,
                                       int32_t activation,
                                       halfbyte_linear **out);

// Packs a layer of a checkpoint for a device, with its bias, from the file to the kernels' layout in one pass. `name`: of the layer, as
// "model.layers.0.self_attn.q_proj"; `act`: what becomes of the activations of a quantised layer, HALFBYTE_ACT_*.
halfbyte_status halfbyte_linear_load(const halfbyte_device *device,
                                     const halfbyte_checkpoint *checkpoint,
                                     const char *name,
                                     int32_t act,
                                     int32_t activation,
                                     halfbyte_linear **out);

// Outputs; 0 of null.
size_t halfbyte_linear_n(const halfbyte_linear *linear);

// Inputs; 0 of null.
size_t halfbyte_linear_k(const halfbyte_linear *linear);

// Bytes that the packed weight takes; 0 of null.
size_t halfbyte_linear_bytes(const halfbyte_linear *linear);

// Multiplies. `x`: floats [.., k]; `y`: floats [.., n] with the same dimensions before the last, which are rows; either in f16, bf16 or
// f32. On a CPU both lie in memory of the host. On a GPU each lies in its memory or the host's: what lies on the GPU is read and written
// in the device's stream, and the call does not wait for it; what lies in the host's is copied, and y is there when the call returns.
halfbyte_status halfbyte_linear_forward(const halfbyte_linear *linear,
                                        const halfbyte_device *device,
                                        const DLTensor *x,
                                        const DLTensor *y);

// Frees a layer; null is nothing. On a GPU it waits for the work that uses it.
void halfbyte_linear_free(halfbyte_linear *linear);

// Packs a weight [co, k] for a device, k being kernel rows, kernel columns, channels in this order, as halfbyte_weight_rtn_conv2d
// makes it. `bias`: floats [co] of the host; null: that of the weight's checkpoint, if it came out of one and there is one, else none.
// `activation`: HALFBYTE_ACTIVATION_*; `x_layout`, `y_layout`: HALFBYTE_LAYOUT_*.
halfbyte_status halfbyte_conv2d_create(const halfbyte_device *device,
                                       const halfbyte_weight *weight,
                                       const halfbyte_conv2d_geometry *geometry,
                                       const DLTensor *bias,
                                       int32_t activation,
                                       int32_t x_layout,
                                       int32_t y_layout,
                                       halfbyte_conv2d **out);

// Convolves. `x`: floats [batch, ci, h, w] and `y`: floats [batch, co, oh, ow], or with channels last, as the layer was made; with
// oh = (h + above + below - dilation (kh - 1) - 1) / stride + 1, rounded down. Memory: as of halfbyte_linear_forward.
halfbyte_status halfbyte_conv2d_forward(const halfbyte_conv2d *conv2d,
                                        const halfbyte_device *device,
                                        const DLTensor *x,
                                        const DLTensor *y);

// Frees a layer; null is nothing. On a GPU it waits for the work that uses it.
void halfbyte_conv2d_free(halfbyte_conv2d *conv2d);

// Packs a weight [n, k] of bytes for a device.
halfbyte_status halfbyte_linear_int8_create(const halfbyte_device *device,
                                            const halfbyte_int8_layer *layer,
                                            halfbyte_linear_int8 **out);

// Multiplies. `x`: bytes [.., k]; `y`: bytes, or floats if the layer was made so, [.., n]. Memory: as of halfbyte_linear_forward.
halfbyte_status halfbyte_linear_int8_forward(const halfbyte_linear_int8 *linear,
                                             const halfbyte_device *device,
                                             const DLTensor *x,
                                             const DLTensor *y);

// Frees a layer; null is nothing. On a GPU it waits for the work that uses it.
void halfbyte_linear_int8_free(halfbyte_linear_int8 *linear);

// Packs a weight [co, ci / groups, kh, kw] of bytes for a device. `x_layout`, `y_layout`: HALFBYTE_LAYOUT_*.
halfbyte_status halfbyte_conv2d_int8_create(const halfbyte_device *device,
                                            const halfbyte_int8_layer *layer,
                                            const halfbyte_conv2d_geometry *geometry,
                                            int32_t x_layout,
                                            int32_t y_layout,
                                            halfbyte_conv2d_int8 **out);

// Convolves. `x`: bytes, `y`: bytes, or floats if the layer was made so; shapes as of halfbyte_conv2d_forward, memory as of
// halfbyte_linear_forward.
halfbyte_status halfbyte_conv2d_int8_forward(const halfbyte_conv2d_int8 *conv2d,
                                             const halfbyte_device *device,
                                             const DLTensor *x,
                                             const DLTensor *y);

// Frees a layer; null is nothing. On a GPU it waits for the work that uses it.
void halfbyte_conv2d_int8_free(halfbyte_conv2d_int8 *conv2d);

// Loads a folder in Hugging Face's form (config.json, tokenizer.json and safetensors) or a GGUF file onto a device. `quantize`: null to
// take the weights as they are stored; a format, as "w4a8-g128", to quantise the dense layers of a model while loading: one that is
// quantised already is refused. `act`: what becomes of the activations of layers that are quantised in the files, HALFBYTE_ACT_*; where
// `quantize` is given, its format says so for all. On a GPU the model has streams of its own, and its products read f16; with
// activations of 32 bits (HALFBYTE_ACT_A32, "w4a32-g128") they read f32.
halfbyte_status halfbyte_model_load(const halfbyte_device *device,
                                    const char *path,
                                    const char *quantize,
                                    int32_t act,
                                    halfbyte_model **out);

// Tokens that a text may have at most; 0 of null.
size_t halfbyte_model_context(const halfbyte_model *model);

// Bytes that the weights take in memory; 0 of null.
size_t halfbyte_model_weight_bytes(const halfbyte_model *model);

// Writes the default options to `out`, of which the program has `struct_size` bytes, its `sizeof(halfbyte_generation_options)`: the most
// likely tokens, 128 at most.
halfbyte_status halfbyte_generation_options_default(size_t struct_size,
                                                    halfbyte_generation_options *out);

// Continues a prompt. `options`: null for the default ones; `callback`: null to be told nothing; `user_data` is handed to it; `result`:
// null if nobody wants to know. Each call begins a new text; calls from several threads go side by side, as far as the device lets them.
halfbyte_status halfbyte_model_generate(const halfbyte_model *model,
                                        const char *prompt,
                                        const halfbyte_generation_options *options,
                                        halfbyte_text_callback callback,
                                        void *user_data,
                                        halfbyte_generation *result);

// Frees a model; null is nothing.
void halfbyte_model_free(halfbyte_model *model);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* HALFBYTE_H */
