//! The built program, as a shell sees it.

mod bench;
mod calibration;
mod chat;
mod contradictions;
mod files;
mod guide;
mod head;
mod hostile;
mod models;
#[cfg(unix)]
mod outputs;
mod ranks;
mod serve;
mod support;
mod usage;
