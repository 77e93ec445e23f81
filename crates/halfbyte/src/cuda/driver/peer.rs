//! Memory that other devices and other processes of a host write into.

use super::memory::Buffer;
use super::{Context, Stream, check};
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUresult};
use std::collections::HashMap;
use std::ffi::c_uint;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

const OP: &str = "memory that ranks share";

/// Bytes of a handle by which another process opens memory.
const HANDLE_BYTES: usize = 64;

/// Where memory lies that others may write into: what [`Inbox::address`] says and [`Peer::open`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Address {
    /// The host: its last start.
    host: [u8; 36],
    process: u32,
    /// Among those that the process sees.
    device: u32,
    pointer: u64,
    handle: [u8; HANDLE_BYTES],
}

impl Address {
    const BYTES: usize = 36 + 4 + 4 + 8 + HANDLE_BYTES;

    fn bytes(&self) -> Vec<u8> {
        let Self { host, process, device, pointer, handle } = self;
        [&host[..], &process.to_le_bytes(), &device.to_le_bytes(), &pointer.to_le_bytes(), handle].concat()
    }

    fn of(bytes: &[u8]) -> Option<Self> {
        let (host, rest) = bytes.split_first_chunk()?;
        let (process, rest) = rest.split_first_chunk()?;
        let (device, rest) = rest.split_first_chunk()?;
        let (pointer, rest) = rest.split_first_chunk()?;
        let handle = rest.try_into().ok()?;
        let [process, device] = [process, device].map(|word| u32::from_le_bytes(*word));
        Some(Self { host: *host, process, device, pointer: u64::from_le_bytes(*pointer), handle })
    }
}

/// What tells hosts apart: the identifier of a system's last start; zeros where the system has none.
fn host() -> [u8; 36] {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut host = [0; 36];
    host.iter_mut().zip(id.trim().bytes()).for_each(|(to, byte)| *to = byte);
    host
}

/// Words of inboxes, by device and pointer.
type Inboxes = HashMap<(u32, u64), Weak<Buffer<u32>>>;

/// Those of this process: ranks that are other threads keep them as long as their kernels may write there.
static INBOXES: LazyLock<Mutex<Inboxes>> = LazyLock::new(Mutex::default);

fn inboxes() -> MutexGuard<'static, Inboxes> {
    INBOXES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Words of a device that other ranks write.
#[derive(Debug)]
pub struct Inbox {
    words: Arc<Buffer<u32>>,
    device: u32,
}

impl Inbox {
    /// So many words, all bits of which are set once the stream is done.
    pub fn new(context: &Context, stream: &Stream, words: usize) -> Result<Self> {
        let mut words = context.allocate(words)?;
        stream.fill(words.view_mut(), 0xff)?;
        let (words, device) = (Arc::new(words), context.info().index);
        inboxes().insert((device, words.pointer()), Arc::downgrade(&words));
        Ok(Self { words, device })
    }

    /// The device's address of the first word.
    pub fn pointer(&self) -> u64 {
        self.words.pointer()
    }

    /// What another rank finds it by. Error: the system lets no other process open it.
    pub fn address(&self, context: &Context) -> Result<Vec<u8>> {
        context.bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the memory was allocated in this context, at its beginning.
        check(OP, unsafe { sys::cuIpcGetMemHandle(&mut handle, self.pointer()) })?;
        let address = Address {
            host: host(),
            process: std::process::id(),
            device: context.info().index,
            pointer: self.pointer(),
            handle: bytemuck::cast(handle.reserved),
        };
        Ok(address.bytes())
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        inboxes().remove(&(self.device, self.words.pointer()));
    }
}

/// Another rank's inbox, as this device reaches it.
#[derive(Debug)]
pub struct Peer {
    context: Context,
    pointer: u64,
    /// If it is this process's: where it lies, and itself. Else it was opened by a handle, and is closed here.
    own: Option<(u32, Arc<Buffer<u32>>)>,
}

impl Peer {
    /// By what the other rank said. Errors: it is on another host, or on a device whose memory this one does not reach; it has gone; no
    /// address.
    pub fn open(context: &Context, address: &[u8]) -> Result<Self> {
        let Some(address) = Address::of(address) else {
            return Err(Error::invalid(
                OP,
                format!("{} bytes of an address", Address::BYTES),
                address.len().to_string(),
            ));
        };
        if address.host != host() {
            return Err(Error::invalid(OP, "ranks on GPUs of one host", "a rank on another host"));
        }
        if address.process == std::process::id() {
            if address.device != context.info().index {
                Self::reach(context, &Context::open(address.device)?)?;
            }
            let words = inboxes().get(&(address.device, address.pointer)).and_then(Weak::upgrade);
            let words = words.ok_or_else(|| Error::invalid(OP, "a rank that is there", "one that has left"))?;
            let own = Some((address.device, words));
            return Ok(Self { context: context.clone(), pointer: address.pointer, own });
        }
        context.bind()?;
        let (mut pointer, handle) = (0, sys::CUipcMemHandle { reserved: bytemuck::cast(address.handle) });
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
        // SAFETY: the context is current; a handle that is none is an answer and no fault.
        check(OP, unsafe { sys::cuIpcOpenMemHandle_v2(&mut pointer, handle, flags) })?;
        Ok(Self { context: context.clone(), pointer, own: None })
    }

    /// Lets kernels of a context reach memory of another.
    fn reach(context: &Context, other: &Context) -> Result<()> {
        let [own, of_other] = [context, other].map(|context| context.0.device);
        let mut reaches = 0;
        // SAFETY: both are devices.
        check(OP, unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, own, of_other) })?;
        if reaches == 0 {
            let [own, of_other] = [context, other].map(|context| context.info().index);
            return Err(Error::Device {
                op: OP,
                cause: format!("cuda:{own} does not reach memory of cuda:{of_other}"),
            });
        }
        context.bind()?;
        // SAFETY: the context is current, and the other one retained. No flags are defined.
        match unsafe { sys::cuCtxEnablePeerAccess(other.0.handle, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            result => check(OP, result),
        }
    }

    /// This device's address of its first word.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Whether it is this process's memory of a context's own device.
    pub fn is_on(&self, context: &Context) -> bool {
        self.own.as_ref().is_some_and(|(device, _)| *device == context.info().index)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if self.own.is_none() && self.context.bind().is_ok() {
            // SAFETY: opened in `open`, closed here once. The driver waits for what still uses it.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.pointer) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_was_said() {
        let address = Address { host: host(), process: 77, device: 3, pointer: 0x7f00_1234_5600, handle: [0xa5; 64] };
        assert_eq!(Address::of(&address.bytes()), Some(address));
        assert_eq!(address.bytes().len(), Address::BYTES);
        assert_eq!(Address::of(&address.bytes()[1..]), None);
        assert_eq!(Address::of(&[]), None);
    }
}
