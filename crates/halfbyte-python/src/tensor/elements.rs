//! Elements of tensors: where they lie in memory of the host, and copies of them.

use crate::error::Failure;
use bytemuck::allocation::try_zeroed_vec;
use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use halfbyte::Floats;
use halfbyte::cuda::driver::View;
use pyo3::PyResult;

/// Elements of a tensor of the host.
///
/// # Safety
/// They lie there, aligned, as long as the caller keeps the tensor. That nobody writes them meanwhile cannot be enforced: as in every
/// tensor library, a program that writes a tensor in one thread and reads it in another gets what it asked for.
pub unsafe fn host_slice<'a, T: Pod>(address: usize, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len) }
}

/// A copy. MemoryError: memory is short.
pub fn copied<T: Pod>(values: &[T]) -> PyResult<Vec<T>> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(values.len()).map_err(|_| Failure::from(short::<T>(values.len())))?;
    copy.extend_from_slice(values);
    Ok(copy)
}

/// A copy as f32. MemoryError: memory is short.
pub fn widened(floats: Floats<'_>) -> PyResult<Vec<f32>> {
    fn each<T: Copy>(values: &[T], wide: impl Fn(T) -> f32) -> PyResult<Vec<f32>> {
        let mut copy = Vec::new();
        copy.try_reserve_exact(values.len()).map_err(|_| Failure::from(short::<f32>(values.len())))?;
        copy.extend(values.iter().map(|&value| wide(value)));
        Ok(copy)
    }
    match floats {
        Floats::F16(values) => each(values, f16::to_f32),
        Floats::BF16(values) => each(values, bf16::to_f32),
        Floats::F32(values) => copied(values),
    }
}

/// The error where memory is short for that many elements.
fn short<T>(len: usize) -> halfbyte::Error {
    halfbyte::Error::Memory { op: "tensor", requested_bytes: len.saturating_mul(size_of::<T>()) }
}

/// That many zeros. Error: memory is short.
pub fn zeroed<T: Zeroable>(len: usize) -> halfbyte::Result<Vec<T>> {
    try_zeroed_vec(len).map_err(|()| short::<T>(len))
}

/// A copy of elements of a GPU. Errors: memory is short; what the GPU says.
pub fn downloaded<T: Pod>(queue: &halfbyte::Cuda, view: View<'_, T>) -> halfbyte::Result<Vec<T>> {
    let mut to = zeroed(view.len())?;
    queue.stream().download(view, &mut to)?;
    Ok(to)
}
