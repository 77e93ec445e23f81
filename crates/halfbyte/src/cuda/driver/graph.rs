//! Graphs: work recorded once and launched again and again with one call.

use super::{Context, Event, Stream, check};
use crate::error::{Error, Result};
use cudarc::driver::sys;

/// Recorded work, ready to be launched.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    handle: sys::CUgraphExec,
}

// SAFETY: the driver takes calls on a graph from every thread, one at a time: `launch` of the same graph is ordered by
// the streams it is launched in.
unsafe impl Send for Graph {}

/// Recordings that are begun until one is whole.
const TRIES: usize = 16;

impl Stream {
    /// Records what `work` puts into this stream instead of doing it.
    ///
    /// Other streams that wait for an event of this one and that this one waits for again are recorded too. Work that is
    /// recorded cannot wait for the device or allocate on it. What another thread of the process does with the device, a library's
    /// perhaps, can end a recording: then `work` is recorded again. Errors: those of `work`, work that cannot be recorded.
    pub fn capture<E: From<Error>>(
        &self,
        mut work: impl FnMut(&Stream) -> std::result::Result<(), E>,
    ) -> std::result::Result<Graph, E> {
        const OP: &str = "capture";
        let mut left = TRIES;
        loop {
            left -= 1;
            self.context().bind()?;
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            // SAFETY: the stream is open.
            check(OP, unsafe { sys::cuStreamBeginCapture_v2(self.handle(), mode) })?;
            let capture = Capture { stream: self };
            let done = work(self);
            if left > 0 && capture.was_ended()? {
                continue;
            }
            // An error in here ends the capture; the graph, if there is one, is dropped.
            done?;
            let graph = match capture.end() {
                Err(_) if left > 0 => continue,
                ended => ended?,
            };
            let mut handle = std::ptr::null_mut();
            // SAFETY: the graph is whole, and no flags are set.
            let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, graph, 0) };
            // SAFETY: the recording is not needed any more.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
            check("instantiate a graph", result)?;
            return Ok(Graph { context: self.context().clone(), handle });
        }
    }
}

impl Stream {
    /// Records work and replays it, and tells how many seconds each replay takes on the device: for measurements.
    ///
    /// `work` is borrowed until the last replay is done, and with it the memory that it uses; none can be allocated or freed
    /// while it is recorded. The replays before the first that counts are `warm_up`.
    pub fn time_replays(
        &self,
        warm_up: usize,
        runs: usize,
        mut work: impl FnMut(&Stream) -> Result<()>,
    ) -> Result<Vec<f64>> {
        let graph = self.capture(&mut work)?;
        let [begin, end] = [Event::new(self.context())?, Event::new(self.context())?];
        let mut seconds = Vec::with_capacity(runs);
        for run in 0..warm_up + runs {
            self.record(&begin)?;
            // SAFETY: `work` lives, and holds the memory that was recorded; the replay is waited for.
            unsafe { graph.launch(self) }?;
            self.record(&end)?;
            end.synchronize()?;
            if run >= warm_up {
                seconds.push(end.seconds_since(&begin)?);
            }
        }
        drop(work);
        Ok(seconds)
    }
}

/// Does what a stream of this thread that is being recorded would forbid, as allocating and loading code, and is no part of
/// what is recorded.
pub(in crate::cuda) fn beside_capture<T>(context: &Context, work: impl FnOnce() -> Result<T>) -> Result<T> {
    context.bind()?;
    let exchange = |mode: &mut sys::CUstreamCaptureMode| {
        // SAFETY: the mode is the thread's own, and the old one takes its place.
        check("capture", unsafe { sys::cuThreadExchangeStreamCaptureMode(mode) })
    };
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    exchange(&mut mode)?;
    let done = work();
    exchange(&mut mode)?;
    done
}

/// A stream that is being recorded, until this is dropped.
struct Capture<'a> {
    stream: &'a Stream,
}

impl Capture<'_> {
    /// Whether something made the recording invalid.
    fn was_ended(&self) -> Result<bool> {
        self.stream.context().bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is open, `status` takes one value.
        check("capture", unsafe { sys::cuStreamIsCapturing(self.stream.handle(), &mut status) })?;
        Ok(status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED)
    }

    fn end(self) -> Result<sys::CUgraph> {
        let stream = self.stream;
        std::mem::forget(self);
        Self::finish(stream)
    }

    fn finish(stream: &Stream) -> Result<sys::CUgraph> {
        stream.context().bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is being recorded.
        check("capture", unsafe { sys::cuStreamEndCapture(stream.handle(), &mut graph) })?;
        Ok(graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if let Ok(graph) = Self::finish(self.stream)
            && !graph.is_null()
        {
            // SAFETY: a recording that nobody has.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
    }
}

impl Graph {
    /// Puts the recorded work into a stream.
    ///
    /// # Safety
    /// All memory that the recorded work reads or writes is still there, on the device and, for copies, on the host, and
    /// stays until the work is done; nothing else uses what it writes meanwhile.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: graph and stream are open; the caller vouches for the memory.
        check("launch a graph", unsafe { sys::cuGraphLaunch(self.handle, stream.handle()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `capture`, closed here once; launches that still run are not harmed.
            let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
        }
    }
}
