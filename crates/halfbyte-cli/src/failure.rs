//! What went wrong, as three lines for people and an exit status for scripts.

use crate::app::SCHEMA;
use crate::escape::{escaped, escaped_lines};
use crate::interrupt;
use crate::text::write_error;
use halfbyte_checkpoint::Error as CheckpointError;
use halfbyte_llm::Error as LlmError;
use serde_json::json;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Exit statuses, the same for every command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The answer is "no".
    No = 1,
    /// Wrong usage.
    Usage = 2,
    /// A bad input file.
    Input = 3,
    /// A device, memory, or a place to write to is not to be had.
    Device = 4,
    /// Ctrl-C.
    Interrupted = 130,
}

/// The reason for which a command ends early.
#[derive(Debug)]
pub enum Failure {
    /// Nobody reads standard output any more, as when `head` has seen enough: no failure at all.
    PipeClosed,
    /// Something to tell.
    Message(Box<Message>),
}

/// An error as it is shown.
#[derive(Debug)]
pub struct Message {
    exit: Exit,
    what: String,
    cause: String,
    help: String,
    /// The rank that has left.
    rank: Option<usize>,
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// An error of this kind. What files and the system say in it is escaped here, line breaks included.
    pub fn new(exit: Exit, what: impl AsRef<str>, cause: impl AsRef<str>, help: impl AsRef<str>) -> Self {
        let line = |text: &str| escaped(text).into_owned();
        let (what, cause, help) = (line(what.as_ref()), line(cause.as_ref()), line(help.as_ref()));
        Self::Message(Box::new(Message { exit, what, cause, help, rank: None }))
    }

    /// Options or arguments that do not go together.
    pub fn usage(what: impl AsRef<str>, cause: impl AsRef<str>, help: impl AsRef<str>) -> Self {
        Self::new(Exit::Usage, what, cause, help)
    }

    /// The system refuses what the device needs.
    pub fn device(what: impl AsRef<str>, cause: impl AsRef<str>) -> Self {
        Self::new(Exit::Device, what, cause, "`halfbyte doctor` shows what this machine offers")
    }

    /// [`Failure::device`] with a cause in lines: what a compiler says, places that were looked at.
    fn device_lines(what: impl AsRef<str>, cause: &str) -> Self {
        let mut failure = Self::device(what, "");
        if let Self::Message(message) = &mut failure {
            message.cause = escaped_lines(cause).into_owned();
        }
        failure
    }

    /// The same, with another help: what a single command can advise.
    pub fn with_help(mut self, help: &str) -> Self {
        if let Self::Message(message) = &mut self {
            message.help = help.to_owned();
        }
        self
    }

    /// The same, with something to know besides its help.
    pub fn and_help(mut self, more: &str) -> Self {
        if let Self::Message(message) = &mut self {
            let more = escaped(more);
            message.help =
                if message.help.is_empty() { more.into_owned() } else { format!("{}; {more}", message.help) };
        }
        self
    }

    /// In one line, without help.
    pub fn text(&self) -> String {
        match self {
            Self::Message(message) => format!("{}: {}", message.what, message.cause),
            Self::PipeClosed => "nobody reads its output".to_owned(),
        }
    }

    /// The rank that has left, where that is why this one ends.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Message(message) => message.rank,
            Self::PipeClosed => None,
        }
    }

    /// The same, with what is known of the cause besides.
    pub fn with_cause(mut self, more: &str) -> Self {
        if let Self::Message(message) = &mut self {
            let more = escaped(more);
            let is_told = more.split(": ").last().is_some_and(|last| message.cause.contains(last));
            if !is_told {
                message.cause = format!("{}; it said: {more}", message.cause);
            }
        }
        self
    }

    /// A rank has left, or is not heard of.
    fn of_rank(rank: usize, cause: &str) -> Self {
        let mut failure = Self::new(
            Exit::Device,
            "the ranks that share the model cannot go on",
            cause,
            "see what that rank says; all run the same command on the same files with the same program",
        );
        if let Self::Message(message) = &mut failure {
            message.rank = Some(rank);
        }
        failure
    }

    /// Rank 0 cannot listen where the others look for it.
    fn listen(address: &str, source: &io::Error) -> Self {
        let help = match source.kind() {
            io::ErrorKind::AddrInUse => {
                "another program has the port: choose another MASTER_PORT, the same for all ranks"
            }
            io::ErrorKind::PermissionDenied => "choose a MASTER_PORT from 1024 on, the same for all ranks",
            _ => "MASTER_ADDR is an address of the machine that rank 0 runs on",
        };
        Self::new(Exit::Device, format!("rank 0 cannot listen at {address}"), source.to_string(), help)
    }

    /// More memory than the machine has free.
    pub fn memory(what: impl AsRef<str>, cause: impl AsRef<str>) -> Self {
        Self::new(Exit::Device, what, cause, "choose smaller sizes, or free some memory")
    }

    /// Ctrl-C.
    pub fn interrupted() -> Self {
        let (cause, help) = match interrupt::writes_files() {
            true => (
                "asked to stop (Ctrl-C or a signal); no output file was left half-written",
                "run the same command again to start over",
            ),
            false => ("asked to stop (Ctrl-C or a signal)", "what was written by then is all there is"),
        };
        Self::new(Exit::Interrupted, "interrupted", cause, help)
    }

    /// The system's refusal to do something with a file.
    pub fn io(verb: &str, path: &Path, source: &io::Error) -> Self {
        let writing =
            ["create", "write", "write to", "rename", "exchange", "remove", "lock", "sync", "create a folder in"]
                .contains(&verb);
        let (exit, help) = match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if writing => {
                (Exit::Device, "choose a place where you may write")
            }
            io::ErrorKind::NotFound if writing => (Exit::Device, "check the path"),
            io::ErrorKind::NotFound => (Exit::Input, "check the path"),
            io::ErrorKind::PermissionDenied => (Exit::Input, "check who may read and write there"),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => (Exit::Device, "free some disk space"),
            io::ErrorKind::FileTooLarge => {
                (Exit::Device, "raise the limit on the size of files (`ulimit -f`), or choose another disk")
            }
            io::ErrorKind::OutOfMemory => (Exit::Device, "free some memory"),
            _ => (if writing { Exit::Device } else { Exit::Input }, "check the path and the disk it lies on"),
        };
        Self::new(exit, format!("cannot {verb} {}", path.display()), source.to_string(), help)
    }

    /// Prints it to standard error, as lines or as a JSON object, and gives the exit status.
    pub fn report(self, json: bool) -> ExitCode {
        match self {
            Failure::PipeClosed => ExitCode::SUCCESS,
            Failure::Message(message) => {
                let Message { exit, what, cause, help, .. } = &*message;
                let exit = *exit as u8;
                write_error(&match json {
                    true => format!(
                        "{}\n",
                        json!({"schema": SCHEMA, "error": what, "cause": cause, "help": help, "exit": exit})
                    ),
                    false => format!("error: {what}\ncause: {cause}\nhelp: {help}\n"),
                });
                ExitCode::from(exit)
            }
        }
    }
}

impl From<halfbyte::Error> for Failure {
    fn from(error: halfbyte::Error) -> Self {
        use halfbyte::Error as E;
        let text = error.to_string();
        match error {
            E::Device { .. } | E::DeviceLost { .. } => Self::device("the device cannot be used", text),
            E::Memory { .. } => Self::memory("the machine has too little memory", text),
            E::DeviceMemory { .. } => Self::memory("the device has too little memory", text),
            E::LibraryMissing { library, .. } => {
                let help = match library {
                    "the NVIDIA driver" => {
                        "install NVIDIA's driver, whose libcuda.so.1 the loader must find (containers are given it: `docker run --gpus all`), or use --device cpu"
                    }
                    _ => {
                        "install it, or name its folder in the variable that is told; `halfbyte doctor` shows what this machine offers"
                    }
                };
                Self::device_lines(format!("{library} is not found"), &text).with_help(help)
            }
            E::DriverTooOld { .. } => Self::device("the GPU's driver is too old", text),
            E::Compile { .. } => Self::device_lines("a GPU kernel cannot be compiled", &text),
            E::NoKernel { .. } => Self::new(
                Exit::Device,
                "no kernel for this product",
                text,
                "`halfbyte explain` lists every kernel with its reason",
            ),
            E::NotFinite { .. } => {
                Self::new(Exit::Input, "the numbers are not finite", text, "check where the weights come from")
            }
            E::Invalid { op: variable, .. } if variable.starts_with("HALFBYTE_") => {
                let help = "set the variable to one of these, or unset it";
                Self::usage(format!("{variable} in the environment is refused"), text, help)
            }
            _ => Self::usage("these values are refused", text, "see --help for what each option takes"),
        }
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        use CheckpointError as E;
        let text = error.to_string();
        match error {
            E::Io { op, path, source } => Self::io(op, &path, &source),
            E::Malformed { file, what } => Self::new(
                Exit::Input,
                format!("{} is damaged or not what its name says", file.display()),
                what,
                "fetch the file again; `halfbyte inspect MODEL` lists what can be read",
            ),
            E::Missing { path, what } => Self::new(
                Exit::Input,
                match path.symlink_metadata() {
                    Ok(_) => format!("{} is not complete", path.display()),
                    Err(_) => format!("{} is missing", path.display()),
                },
                what,
                "a MODEL is a folder with config.json, tokenizer.json and weights, or a GGUF file; `halfbyte inspect MODEL` lists what is missing",
            ),
            E::Unsupported { file, what } => Self::new(
                Exit::Input,
                format!("{} holds what this version does not read", file.display()),
                what,
                "`halfbyte inspect MODEL` shows what of it is read",
            ),
            E::Unrepresentable { tensor, reason, scheme } => Self::usage(
                format!("tensor `{tensor}` cannot be written"),
                format!("{scheme} cannot hold it: {reason}"),
                "choose another form, or other bits and groups (--bits, --group); convert rounds again with --requantize",
            ),
            E::Exists { path, why } => Self::usage(
                format!("{} already exists{why}", path.display()),
                "nothing is replaced unless asked for, and a folder only if it holds a model and nothing else",
                match why.contains("ask to overwrite") && std::env::args_os().all(|word| word != "--overwrite") {
                    true => "choose another output, or add --overwrite",
                    false => "choose another output, or remove what is there yourself",
                },
            ),
            E::Locked { path } => Self::usage(
                format!("{} is in use", path.display()),
                "another process writes the same target",
                "wait until it is done, or choose another output",
            ),
            E::Cancelled => Self::interrupted(),
            E::Numbers { tensor, source } => Self::new(
                Exit::Input,
                format!("tensor `{tensor}` is refused"),
                source.to_string(),
                "check where the weights come from",
            ),
            _ => Self::usage("these values are refused", text, "see --help for what each option takes"),
        }
    }
}

impl From<LlmError> for Failure {
    fn from(error: LlmError) -> Self {
        use LlmError as E;
        let text = error.to_string();
        match error {
            E::Io { path, source } => Self::io("read or write", &path, &source),
            E::Unfinished { path, what } => Self::usage(
                format!("the unfinished work in {} cannot be gone on with", path.display()),
                what,
                "give the same options and files as then, or add --restart to discard it",
            ),
            E::Locked { path } => Self::usage(
                format!("{} is in use", path.display()),
                "another process works on the same target",
                "wait until it is done, or choose another output",
            ),
            E::Config { path, field, expected, got } => Self::new(
                Exit::Input,
                format!("{} does not describe a model that can run", path.display()),
                format!("field {field}: expected {expected}, got {got}"),
                "`halfbyte inspect MODEL` shows what is in the folder",
            ),
            E::Rank { rank, .. } => Self::of_rank(rank, &text),
            E::Listen { address, source } => Self::listen(&address, &source),
            E::Launcher { .. } => Self::usage(
                "what the launcher says of the ranks makes no sense",
                text,
                "each rank has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without WORLD_SIZE --tp starts the ranks itself",
            ),
            E::Tokenizer(cause) => Self::new(
                Exit::Input,
                "the tokenizer cannot be used",
                cause,
                "check tokenizer.json in the MODEL folder",
            ),
            E::Chat { path, what } => Self::new(
                Exit::Input,
                format!("the chat template of {} refuses the conversation, or cannot be used", path.display()),
                what,
                "check what is said and its order (--system may be what it refuses), or the template",
            ),
            E::Weight { .. } => Self::new(
                Exit::Input,
                "the weights do not fit the configuration",
                text,
                "`halfbyte inspect MODEL` lists the tensors",
            ),
            E::Quantize { .. } => Self::new(
                Exit::Input,
                "a weight cannot be quantised",
                text,
                "check the tensor, or choose another format",
            ),
            E::EmptyPrompt => Self::usage("there is nothing to read", text, "give at least one token"),
            E::ContextFull { .. } | E::TextTooLong { .. } => Self::usage(
                "more tokens than the model's context has room for",
                text,
                "shorten the text, the --window or the --context; max_position_embeddings in config.json is the limit",
            ),
            E::Input { .. } => Self::new(
                Exit::Input,
                "the text or the ids do not fit",
                text,
                "give more text or a smaller --window; ids are those of the model's tokenizer",
            ),
            E::UnknownToken { .. } => {
                Self::new(Exit::Input, "a token id is unknown to the model", text, "use the model's own tokenizer")
            }
            E::NotFinite(_) => Self::new(
                Exit::Input,
                "the model computes NaN or infinity",
                text,
                "`halfbyte inspect --data MODEL` names the tensors that hold such numbers, if any do",
            ),
            E::Text { path, line, expected, got } => Self::new(
                Exit::Input,
                format!("{}, line {line}, is not a document", path.display()),
                format!("expected {expected}, got {got}"),
                "each line is one document: {\"text\": \"...\"}",
            ),
            E::Cancelled => Self::interrupted(),
            E::Numbers(source) => source.into(),
            E::Checkpoint(source) => source.into(),
            _ => Self::usage("these values are refused", text, "see --help for what each option takes"),
        }
    }
}
