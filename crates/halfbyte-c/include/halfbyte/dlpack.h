/*
 * DLPack's DLTensor: from dlpack/dlpack.h where that lies on the include path, or was included before; else declared here, as
 * version 1 of DLPack has it (https://dmlc.github.io/dlpack/latest/c_api.html), as far as halfbyte.h needs it.
 */
#ifndef HALFBYTE_DLPACK_H
#define HALFBYTE_DLPACK_H

#if !defined(DLPACK_DLPACK_H_) && defined(__has_include)
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif
#endif

#ifndef DLPACK_DLPACK_H_
#include <stdint.h>

/* Kinds of devices: memory of the host, of a GPU, of the host as CUDA pins it, of both as CUDA moves it. */
enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };

/* Kinds of elements. */
enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4 };

typedef struct DLDevice {
  int32_t device_type;
  int32_t device_id;
} DLDevice;

typedef struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct DLTensor {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* in elements; null: row-major without gaps */
  uint64_t byte_offset;
} DLTensor;
#endif

#endif /* HALFBYTE_DLPACK_H */
