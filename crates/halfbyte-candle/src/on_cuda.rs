//! What the layer does on a GPU: in the stream of candle's device, on the memory of its tensors.

use crate::layer::{Layer, QLinear, wrap};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use candle_core::{CudaDevice, CudaStorage, Layout, Result, Shape, bail};
use half::{bf16, f16};
use halfbyte::cuda::driver::{FloatView, FloatViewMut, Stream, View, ViewMut};
use halfbyte::cuda::{Cuda, Gpu};
use halfbyte::{Linear, Weight};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A GPU's number and a stream's handle.
type Key = (usize, usize);

/// A queue with the stream that it is of, which stays open as long.
type Kept = (Cuda, Arc<CudaStream>);

thread_local! {
    /// candle's devices use the default stream of each thread as a rule, whose handle is the same in all of them: each thread has queues
    /// of its own, with workspaces of their own.
    static QUEUES: RefCell<HashMap<Key, Kept>> = RefCell::default();
}

/// A GPU, opened once: what is loaded for one layer serves all.
fn gpu(index: usize) -> Result<Arc<Gpu>> {
    static GPUS: Mutex<Option<HashMap<usize, Arc<Gpu>>>> = Mutex::new(None);
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = gpus.get_or_insert_default();
    if let Some(gpu) = gpus.get(&index) {
        return Ok(gpu.clone());
    }
    let gpu = Arc::new(Gpu::open(u32::try_from(index).map_err(wrap)?).map_err(wrap)?);
    gpus.insert(index, gpu.clone());
    Ok(gpu)
}

/// The queue of this thread on a device's stream.
fn queue(device: &CudaDevice) -> Result<Cuda> {
    let stream = device.cuda_stream();
    let index = stream.context().ordinal();
    let key = (index, stream.cu_stream() as usize);
    QUEUES.with(|queues| {
        if let Some((cuda, _)) = queues.borrow().get(&key) {
            return Ok(cuda.clone());
        }
        let gpu = gpu(index)?;
        // SAFETY: candle's contexts are primary ones, as ours, and the stream is kept beside the queue, so that it stays open.
        let raw = unsafe { Stream::from_raw(gpu.context(), stream.cu_stream().cast()) };
        let cuda = Cuda::new(gpu, raw).map_err(wrap)?;
        queues.borrow_mut().insert(key, (cuda.clone(), stream));
        Ok(cuda)
    })
}

/// Packs a weight for a device.
pub(crate) fn pack(device: &CudaDevice, weight: Weight<'_>, bias: Option<Vec<f32>>) -> Result<Linear<Cuda>> {
    let cuda = queue(device)?;
    let linear = Linear::on(&cuda, weight).map_err(wrap)?;
    let linear = match bias {
        Some(bias) => linear.with_bias(bias).map_err(wrap)?,
        None => linear,
    };
    // Any stream may use it from here on.
    cuda.synchronize().map_err(wrap)?;
    Ok(linear)
}

/// An element type of tensors on both sides.
trait Element: DeviceRepr + bytemuck::Pod {
    fn read<'a>(view: View<'a, Self>) -> FloatView<'a>;
    fn written<'a>(view: ViewMut<'a, Self>) -> FloatViewMut<'a>;
}

macro_rules! elements {
    ($($type:ty),*) => {$(
        impl Element for $type {
            fn read<'a>(view: View<'a, Self>) -> FloatView<'a> {
                view.into()
            }

            fn written<'a>(view: ViewMut<'a, Self>) -> FloatViewMut<'a> {
                view.into()
            }
        }
    )*};
}

elements!(f32, f16, bf16);

/// Multiplies, in the stream of the device; nothing is waited for.
pub(crate) fn forward(layer: &QLinear, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
    #[allow(irrefutable_let_patterns)]
    let Layer::Cuda(linear) = &*layer.0 else {
        bail!("halfbyte: expected x on the CPU, where the weight lies, got one on a GPU");
    };
    let (m, range, shape) = layer.rows(layout)?;
    let device = &storage.device;
    let call = Call { linear, cuda: queue(device)?, device, m, range, len: shape.elem_count() };
    let slice = match &storage.slice {
        CudaStorageSlice::F32(x) => CudaStorageSlice::F32(call.run(x)?),
        CudaStorageSlice::F16(x) => CudaStorageSlice::F16(call.run(x)?),
        CudaStorageSlice::BF16(x) => CudaStorageSlice::BF16(call.run(x)?),
        _ => bail!("halfbyte: expected x of f32, f16 or bf16, got another type"),
    };
    Ok((CudaStorage { slice, device: device.clone() }, shape))
}

struct Call<'a> {
    linear: &'a Linear<Cuda>,
    cuda: Cuda,
    device: &'a CudaDevice,
    m: usize,
    range: [usize; 2],
    /// Elements of y.
    len: usize,
}

impl Call<'_> {
    fn run<T: Element>(&self, x: &CudaSlice<T>) -> Result<CudaSlice<T>> {
        let [begin, end] = self.range;
        // SAFETY: every element is written below, in the stream that whoever reads it waits for; after an error nobody has it.
        let mut y = unsafe { self.device.alloc::<T>(self.len) }?;
        if self.len == 0 {
            return Ok(y);
        }
        let stream = self.device.cuda_stream();
        {
            let (x_at, _read) = x.device_ptr(&stream);
            let (y_at, _written) = y.device_ptr_mut(&stream);
            // SAFETY: candle's tensors have these elements, which stay there until the stream is done: it frees memory in the stream.
            let (x, y) = unsafe {
                let x = View::<T>::from_raw(x_at + (begin * size_of::<T>()) as u64, end - begin);
                (x, ViewMut::<T>::from_raw(y_at, self.len))
            };
            self.linear.forward(&self.cuda, T::read(x), self.m, T::written(y)).map_err(wrap)?;
        }
        Ok(y)
    }
}
