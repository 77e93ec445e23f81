//! halfbyte for Python: the extension module `halfbyte._halfbyte`, which the package `halfbyte` shows.
//!
//! A class a file: it takes tensors as `tensor::Input`, computes without Python's lock (`device::compute`), and returns
//! `tensor::Output`; errors become exceptions in `error`.

mod checkpoint;
mod conv2d;
mod device;
mod error;
mod folder;
mod generation;
mod int8;
mod linear;
mod model;
mod number;
mod paddle;
mod quantize;
mod tensor;

use pyo3::prelude::*;

#[pymodule]
mod _halfbyte {
    use super::*;

    #[pymodule_export]
    use crate::checkpoint::{_inspect, _verify, Checkpoint, linear_from_tensors, parse_format};
    #[pymodule_export]
    use crate::conv2d::Conv2d;
    #[pymodule_export]
    use crate::device::{_after_fork, cuda_device_count, get_num_threads, set_num_threads};
    #[pymodule_export]
    use crate::folder::{_convert, _quantize_model};
    #[pymodule_export]
    use crate::generation::Generation;
    #[pymodule_export]
    use crate::int8::{Conv2dInt8, LinearInt8};
    #[pymodule_export]
    use crate::linear::Linear;
    #[pymodule_export]
    use crate::model::{Model, load};
    #[pymodule_export]
    use crate::paddle::{
        _paddle_apply_per_channel_scale, _paddle_linear, _paddle_llm_int8_linear, _paddle_weight_dequantize,
        _paddle_weight_quantize,
    };
    #[pymodule_export]
    use crate::quantize::{Hessian, QuantizedTensor, quantize};
    #[pymodule_export]
    use crate::tensor::Tensor;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
