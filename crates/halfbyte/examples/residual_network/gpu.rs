//! A GPU as a machine: tensors stay on the device, all work is in one queue, and the host waits only where it wants numbers.

use super::machine::{Machine, X, XBytes, Y, YBytes};
use half::f16;
use halfbyte::cuda::Cuda;
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, View, ViewMut};
use halfbyte::cuda::nn;
use halfbyte::format::int8::{Mean, Sum};
use halfbyte::{Float, Result};
use std::cell::RefCell;
use std::rc::Rc;

/// Memory of tensors that are gone. The next ones take it: the queue is done with it before it is written again.
type Free = Rc<RefCell<Vec<Buffer<u8>>>>;

/// A GPU with a queue, and memory for tensors.
pub struct Gpu {
    cuda: Cuda,
    free: Free,
}

/// Floats of a type, or bytes, in device memory.
pub struct Tensor {
    memory: Option<Buffer<u8>>,
    bytes: usize,
    dtype: Float,
    free: Free,
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.free.borrow_mut().extend(self.memory.take());
    }
}

impl Tensor {
    fn view(&self) -> View<'_, u8> {
        self.memory.as_ref().expect("memory until it is dropped").view().slice(0..self.bytes)
    }

    fn view_mut(&mut self) -> ViewMut<'_, u8> {
        self.memory.as_mut().expect("memory until it is dropped").view_mut().slice(0..self.bytes)
    }

    fn floats(&self) -> FloatView<'_> {
        if self.dtype == Float::F32 { self.view().cast::<f32>().into() } else { self.view().cast::<f16>().into() }
    }

    fn floats_mut(&mut self) -> FloatViewMut<'_> {
        if self.dtype == Float::F32 {
            self.view_mut().cast::<f32>().into()
        } else {
            self.view_mut().cast::<f16>().into()
        }
    }
}

impl Gpu {
    pub fn new(cuda: Cuda) -> Self {
        Self { cuda, free: Free::default() }
    }

    fn tensor(&self, dtype: Float, bytes: usize) -> Result<Tensor> {
        let mut free = self.free.borrow_mut();
        let fits = free.iter().position(|memory| memory.len() >= bytes && memory.len() <= 2 * bytes);
        let memory = match fits {
            Some(at) => free.swap_remove(at),
            None => self.cuda.gpu().context().allocate(bytes)?,
        };
        Ok(Tensor { memory: Some(memory), bytes, dtype, free: self.free.clone() })
    }
}

impl Machine for Gpu {
    type Device = Cuda;
    type Floats = Tensor;
    type Bytes = Tensor;
    const IMAGES: Float = Float::F16;

    fn device(&self) -> &Cuda {
        &self.cuda
    }

    fn floats(&self, dtype: Float, len: usize) -> Result<Tensor> {
        self.tensor(dtype, len * dtype.size_bytes())
    }

    fn bytes(&self, len: usize) -> Result<Tensor> {
        self.tensor(Float::F16, len)
    }

    fn x(values: &Tensor) -> X<'_, Self> {
        values.floats().into()
    }

    fn y(values: &mut Tensor) -> Y<'_, Self> {
        values.floats_mut().into()
    }

    fn x_bytes(codes: &Tensor) -> XBytes<'_, Self> {
        codes.view().into()
    }

    fn y_bytes(codes: &mut Tensor) -> YBytes<'_, Self> {
        codes.view_mut().into()
    }

    fn upload(&self, values: &[f32]) -> Result<Tensor> {
        let halves: Vec<f16> = values.iter().map(|&v| f16::from_f32(v)).collect();
        let mut tensor = self.floats(Float::F16, halves.len())?;
        self.cuda.stream().upload(&halves, tensor.view_mut().cast())?;
        Ok(tensor)
    }

    fn upload_bytes(&self, codes: &[u8]) -> Result<Tensor> {
        let mut tensor = self.bytes(codes.len())?;
        self.cuda.stream().upload(codes, tensor.view_mut())?;
        Ok(tensor)
    }

    fn download(&self, values: &Tensor) -> Result<Vec<f32>> {
        let mut wide = vec![0.0; values.floats().len()];
        if values.dtype == Float::F32 {
            self.cuda.download(values.floats(), &mut wide)?;
        } else {
            let mut halves = vec![f16::ZERO; wide.len()];
            self.cuda.download(values.floats(), &mut halves)?;
            wide.iter_mut().zip(halves).for_each(|(v, half)| *v = half.to_f32());
        }
        Ok(wide)
    }

    fn download_bytes(&self, codes: &Tensor) -> Result<Vec<u8>> {
        let mut bytes = vec![0; codes.bytes];
        self.cuda.stream().download(codes.view(), &mut bytes)?;
        Ok(bytes)
    }

    fn add(&self, [a, b]: [&Tensor; 2], y: &mut Tensor) -> Result<()> {
        nn::add(self.cuda.gpu(), self.cuda.stream(), [a.floats(), b.floats()], true, y.floats_mut())
    }

    fn add_codes(&self, sum: &Sum, [a, b]: [&Tensor; 2], y: &mut Tensor) -> Result<()> {
        nn::add_codes(self.cuda.gpu(), self.cuda.stream(), sum, [a.view(), b.view()], y.view_mut())
    }

    fn mean(&self, x: &Tensor, size: [usize; 3], y: &mut Tensor) -> Result<()> {
        nn::mean(self.cuda.gpu(), self.cuda.stream(), x.floats(), size, y.floats_mut())
    }

    fn mean_codes(&self, mean: &Mean, x: &Tensor, size: [usize; 3], y: &mut Tensor) -> Result<()> {
        nn::mean_codes(self.cuda.gpu(), self.cuda.stream(), mean, x.view(), size, y.view_mut())
    }
}
