//! A GPU as a device that layers run on: the GPU, a queue of work, and the memory that their products work in.
//!
//! ```text
//! x of the host:    copied to the device, waited for         x in device memory:    read where it lies, in the queue
//! y of the host:    copied from the device, waited for       y in device memory:    written in the queue, not waited for
//! ```
//!
//! The workspace grows with what is asked for and shrinks never: work that was recorded goes on using the one that it was
//! recorded with, so that one which is outgrown is kept too. Each is at least twice as large as the one before, and all
//! together take at most twice what the largest takes.

use super::driver::{Buffer, FloatView, FloatViewMut, Stream, View, ViewMut};
use super::nn::FloatBuffer;
use super::tensor::{AnyBytes, AnyBytesMut, AnyFloats, AnyFloatsMut};
use super::{Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::int8::{Bytes, BytesMut};
use crate::tensor::{Float, Floats, FloatsMut};
use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A GPU with a queue of work and all memory that work there needs beside weights and tensors. Clones share all of it.
///
/// Layers are made for it and run on it. Work of one queue is done in order; several queues of one GPU may run side by
/// side, and each layer runs in all of them.
#[derive(Clone, Debug)]
pub struct Cuda(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    /// Goes before the stream that it is used in, and the GPU that it lies on.
    room: Mutex<Room>,
    stream: Stream,
    gpu: Arc<Gpu>,
}

/// Memory that work in a queue shares.
#[derive(Debug, Default)]
struct Room {
    workspace: Option<Workspace>,
    outgrown: Vec<Workspace>,
    /// Copies of tensors of the host.
    x: Option<Buffer<u8>>,
    y: Option<Buffer<u8>>,
}

/// The workspace of a queue, while a product's launches are put there.
pub(crate) struct Working<'a>(MutexGuard<'a, Room>);

impl Working<'_> {
    /// None before any was needed.
    pub(crate) fn get(&mut self) -> Option<&mut Workspace> {
        self.0.workspace.as_mut()
    }
}

impl Cuda {
    /// GPU `index` with a new queue. Errors: those of [`Gpu::open`].
    pub fn open(index: u32) -> Result<Self> {
        let gpu = Arc::new(Gpu::open(index)?);
        let stream = gpu.stream()?;
        Self::new(gpu, stream)
    }

    /// A GPU that is open with a queue of the caller's, which may be that of another library ([`Stream::from_raw`]). Error: a
    /// queue of another GPU.
    pub fn new(gpu: Arc<Gpu>, stream: Stream) -> Result<Self> {
        let [expected, got] = [gpu.context(), stream.context()].map(|context| context.info().index);
        if expected != got {
            return Err(Error::invalid("cuda", format!("a stream of GPU {expected}"), format!("one of GPU {got}")));
        }
        Ok(Self(Arc::new(Queue { room: Mutex::default(), stream, gpu })))
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.0.gpu
    }

    /// The queue.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Waits for all work in the queue. Error: the work failed, or work before it.
    pub fn synchronize(&self) -> Result<()> {
        self.stream().synchronize()
    }

    /// A workspace of at least so many bytes, so that work which needs no more can be recorded. Errors: memory is short, work
    /// is being recorded already.
    pub fn reserve(&self, bytes: usize) -> Result<()> {
        let Room { workspace, outgrown, .. } = &mut *self.room();
        self.grown("reserve", workspace, outgrown, bytes).map(drop)
    }

    /// Floats in device memory, with whatever bits lie there. Error: memory is short.
    pub fn allocate(&self, dtype: Float, len: usize) -> Result<FloatBuffer> {
        FloatBuffer::allocate(self.gpu(), dtype, len)
    }

    /// Floats copied to device memory. Error: memory is short.
    pub fn upload<'a>(&self, values: impl Into<Floats<'a>>) -> Result<FloatBuffer> {
        FloatBuffer::upload(self.gpu(), self.stream(), values.into())
    }

    /// Floats copied from device memory, once the work before is done. Error: another length or type.
    pub fn download<'a>(&self, from: FloatView<'_>, to: impl Into<FloatsMut<'a>>) -> Result<()> {
        match (from, to.into()) {
            (FloatView::F16(from), FloatsMut::F16(to)) => self.stream().download(from, to),
            (FloatView::BF16(from), FloatsMut::BF16(to)) => self.stream().download(from, to),
            (FloatView::F32(from), FloatsMut::F32(to)) => self.stream().download(from, to),
            (from, to) => Err(Error::invalid("download", format!("room for {}", from.dtype()), to.dtype().name())),
        }
    }

    /// Runs `work` on floats in device memory, and on a workspace of at least `bytes` if that is more than none.
    pub(crate) fn floats(
        &self,
        op: &'static str,
        x: AnyFloats<'_>,
        y: AnyFloatsMut<'_>,
        bytes: usize,
        work: impl FnOnce(FloatView<'_>, FloatViewMut<'_>, Option<&mut Workspace>) -> Result<()>,
    ) -> Result<()> {
        let Room { workspace, outgrown, x: x_room, y: y_room } = &mut *self.room();
        let workspace = self.grown(op, workspace, outgrown, bytes)?;
        let x = match x {
            AnyFloats::Device(x) => x,
            AnyFloats::Host(x) => float_view(self.uploaded(op, x_room, bytes_of(x))?, x.dtype()),
        };
        self.to_floats(op, y, y_room, |y| work(x, y, workspace))
    }

    /// The workspace, with at least so many bytes if that is more than none. Nobody else has it until it is dropped.
    pub(crate) fn workspace(&self, op: &'static str, bytes: usize) -> Result<Working<'_>> {
        let mut room = self.room();
        let Room { workspace, outgrown, .. } = &mut *room;
        self.grown(op, workspace, outgrown, bytes)?;
        Ok(Working(room))
    }

    /// The same as [`Cuda::floats`] with bytes, as their bits.
    pub(crate) fn bytes(
        &self,
        op: &'static str,
        x: AnyBytes<'_>,
        y: AnyBytesMut<'_>,
        bytes: usize,
        work: impl FnOnce(View<'_, u8>, ViewMut<'_, u8>, Option<&mut Workspace>) -> Result<()>,
    ) -> Result<()> {
        let Room { workspace, outgrown, x: x_room, y: y_room } = &mut *self.room();
        let workspace = self.grown(op, workspace, outgrown, bytes)?;
        let x = self.of_bytes(op, x, x_room)?;
        let to: &mut [u8] = match y {
            AnyBytesMut::U8(y) => return work(x, y, workspace),
            AnyBytesMut::I8(y) => return work(x, y.cast(), workspace),
            AnyBytesMut::Host(BytesMut::U8(y)) => y,
            AnyBytesMut::Host(BytesMut::I8(y)) => cast_slice_mut(y),
        };
        let staged = self.staged(op, y_room, to.len())?;
        work(x, staged.view_mut().slice(0..to.len()), workspace)?;
        self.stream().download(staged.view().slice(0..to.len()), to)
    }

    /// The same with bytes that become floats.
    pub(crate) fn bytes_to_floats(
        &self,
        op: &'static str,
        x: AnyBytes<'_>,
        y: AnyFloatsMut<'_>,
        bytes: usize,
        work: impl FnOnce(View<'_, u8>, FloatViewMut<'_>, Option<&mut Workspace>) -> Result<()>,
    ) -> Result<()> {
        let Room { workspace, outgrown, x: x_room, y: y_room } = &mut *self.room();
        let workspace = self.grown(op, workspace, outgrown, bytes)?;
        let x = self.of_bytes(op, x, x_room)?;
        self.to_floats(op, y, y_room, |y| work(x, y, workspace))
    }

    /// Under the lock a product's launches lie next to each other in the queue: they share the workspace.
    fn room(&self) -> MutexGuard<'_, Room> {
        self.0.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grown<'a>(
        &self,
        op: &'static str,
        workspace: &'a mut Option<Workspace>,
        outgrown: &mut Vec<Workspace>,
        bytes: usize,
    ) -> Result<Option<&'a mut Workspace>> {
        let given = workspace.as_ref().map_or(0, Workspace::bytes);
        if given < bytes {
            self.refuse_if_recorded(
                op,
                || format!("a workspace of {bytes} bytes, reserved before work is recorded"),
                || format!("one of {given}"),
            )?;
            let larger = Workspace::new(self.gpu(), self.stream(), bytes.max(2 * given))?;
            outgrown.extend(workspace.replace(larger));
        }
        Ok(workspace.as_mut())
    }

    fn to_floats(
        &self,
        op: &'static str,
        y: AnyFloatsMut<'_>,
        room: &mut Option<Buffer<u8>>,
        work: impl FnOnce(FloatViewMut<'_>) -> Result<()>,
    ) -> Result<()> {
        let y = match y {
            AnyFloatsMut::Device(y) => return work(y),
            AnyFloatsMut::Host(y) => y,
        };
        let (dtype, to): (Float, &mut [u8]) = match y {
            FloatsMut::F16(y) => (Float::F16, cast_slice_mut(y)),
            FloatsMut::BF16(y) => (Float::BF16, cast_slice_mut(y)),
            FloatsMut::F32(y) => (Float::F32, cast_slice_mut(y)),
        };
        let staged = self.staged(op, room, to.len())?;
        let view = staged.view_mut().slice(0..to.len());
        work(match dtype {
            Float::F16 => view.cast::<f16>().into(),
            Float::BF16 => view.cast::<bf16>().into(),
            Float::F32 => view.cast::<f32>().into(),
        })?;
        self.stream().download(staged.view().slice(0..to.len()), to)
    }

    fn of_bytes<'a>(
        &self,
        op: &'static str,
        x: AnyBytes<'a>,
        room: &'a mut Option<Buffer<u8>>,
    ) -> Result<View<'a, u8>> {
        match x {
            AnyBytes::U8(x) => Ok(x),
            AnyBytes::I8(x) => Ok(x.cast()),
            AnyBytes::Host(Bytes::U8(x)) => self.uploaded(op, room, x),
            AnyBytes::Host(Bytes::I8(x)) => self.uploaded(op, room, cast_slice(x)),
        }
    }

    fn uploaded<'a>(&self, op: &'static str, room: &'a mut Option<Buffer<u8>>, from: &[u8]) -> Result<View<'a, u8>> {
        let staged = self.staged(op, room, from.len())?;
        self.stream().upload(from, staged.view_mut().slice(0..from.len()))?;
        Ok(staged.view().slice(0..from.len()))
    }

    /// Memory for the copy of a tensor of the host. What it held before was waited for, or is read in the queue before this.
    fn staged<'a>(
        &self,
        op: &'static str,
        room: &'a mut Option<Buffer<u8>>,
        bytes: usize,
    ) -> Result<&'a mut Buffer<u8>> {
        self.refuse_if_recorded(
            op,
            || "tensors in device memory while work is recorded".into(),
            || "one of the host".into(),
        )?;
        let buffer = match room.take() {
            Some(buffer) if buffer.len() >= bytes => buffer,
            _ => self.gpu().context().allocate(bytes.next_power_of_two())?,
        };
        Ok(room.insert(buffer))
    }

    fn refuse_if_recorded(
        &self,
        op: &'static str,
        expected: impl FnOnce() -> String,
        got: impl FnOnce() -> String,
    ) -> Result<()> {
        if self.stream().is_recorded()? { Err(Error::invalid(op, expected(), got())) } else { Ok(()) }
    }
}

fn bytes_of(x: Floats<'_>) -> &[u8] {
    match x {
        Floats::F16(x) => cast_slice(x),
        Floats::BF16(x) => cast_slice(x),
        Floats::F32(x) => cast_slice(x),
    }
}

fn float_view(bytes: View<'_, u8>, dtype: Float) -> FloatView<'_> {
    match dtype {
        Float::F16 => bytes.cast::<f16>().into(),
        Float::BF16 => bytes.cast::<bf16>().into(),
        Float::F32 => bytes.cast::<f32>().into(),
    }
}
