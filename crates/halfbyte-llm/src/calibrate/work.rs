//! Unfinished work on disk: blocks that are done, so that a run that was stopped goes on where it was.
//!
//! ```text
//! .<target>.partial/
//!     lock                    held while a process works here
//!     manifest.json           everything that the result depends on
//!     block-00000/            a finished block, behind them the head: it gets this name when all of it is on disk
//!         model.safetensors   <layer>.codes u8 [n, bytes], scales f32 [n, groups], zeros u16 or offsets f32 [n, groups],
//!                             group_index u32 [k]; other tensors that changed, under their own names, f32
//!         report.json
//!         SHA256SUMS          of both, as `sha256sum` writes them; a block that differs is refused
//! ```
//!
//! Codes of 2, 4 and 8 bits lie side by side in a byte, the first in its lowest bits; codes of 3 bits in fields of 4.

use super::report::LayerReport;
use crate::arch::spec::LinearGroup;
use crate::error::{Error, Result};
use halfbyte::{QTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::files::{self, Lock};
use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_checkpoint::{Checkpoint, DType, sync_dir, write_synced};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

const LOCK: &str = "lock";
const MANIFEST: &str = "manifest.json";
const WEIGHTS: &str = "model.safetensors";
const REPORT: &str = "report.json";
const SUMS: &str = "SHA256SUMS";
/// No manifest, report or list of checksums comes near this; a longer one is not ours.
const LONGEST_TEXT: u64 = 64 << 20;

/// A folder of unfinished work, locked against other processes.
#[derive(Debug)]
pub(super) struct WorkFolder {
    path: PathBuf,
    /// Locked as long as it is open; None: the file system has no locks.
    _lock: Option<File>,
    /// The block that was read last, whose files are what they were when it was finished.
    last: Mutex<Option<(usize, Arc<Checkpoint>)>>,
}

/// A finished block.
#[derive(Clone, Debug, Default)]
pub(super) struct Block {
    /// Its quantised layers by name.
    pub tensors: Vec<(String, QTensor)>,
    /// Other tensors that changed, by name.
    pub changed: Vec<(String, Vec<f32>)>,
    /// What became of each layer.
    pub report: Vec<LayerReport>,
}

impl WorkFolder {
    /// The folder beside `target` in which work on it lies.
    pub fn path_of(target: &Path) -> Result<PathBuf> {
        let absolute = std::path::absolute(target).map_err(|source| Error::io(target, source))?;
        match (absolute.parent(), absolute.file_name()) {
            (Some(parent), Some(name)) => Ok(parent.join(format!(".{}.partial", name.to_string_lossy()))),
            _ => Err(Error::invalid("calibration", "a target folder with a name", target.display().to_string())),
        }
    }

    /// Makes the folder or goes on with it.
    ///
    /// Errors: another process works there, or it was begun with another manifest and `restart` does not discard it.
    pub fn open(target: &Path, manifest: Map<String, Value>, restart: bool) -> Result<Self> {
        let path = Self::path_of(target)?;
        files::create_dirs(&path).map_err(|source| Error::io(&path, source))?;
        let lock_path = path.join(LOCK);
        let lock = match files::lock(&lock_path).map_err(|source| Error::io(&lock_path, source))? {
            Lock::Held(lock) => Some(lock),
            Lock::Unsupported => None,
            Lock::Busy => return Err(Error::Locked { path }),
        };
        let this = Self { path, _lock: lock, last: Mutex::new(None) };
        this.clean(restart)?;
        let manifest_path = this.path.join(MANIFEST);
        if manifest_path.exists() {
            this.compare(&read_json(&manifest_path)?, &manifest)?;
        } else if this.entries()?.iter().any(|name| name != LOCK) {
            return Err(this.refuse("it holds something but no manifest.json"));
        } else {
            write_synced(&manifest_path, format!("{:#}\n", Value::Object(manifest)).as_bytes())?;
            sync_dir(&this.path)?;
        }
        Ok(this)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes what a killed process left half-written; everything, if asked to: blocks first, so that what is left when this
    /// is killed can be gone on with.
    fn clean(&self, everything: bool) -> Result<()> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let mut names = self.entries()?;
        names.sort_by_key(|name| !name.ends_with(".tmp"));
        for name in names {
            let path = self.path.join(&name);
            let removed = if name == LOCK || !(everything || name.ends_with(".tmp")) {
                Ok(())
            } else if !path.is_dir() {
                files::remove_file(&path)
            } else if name.ends_with(".tmp") {
                files::remove_folder(&path)
            } else {
                let half = self.path.join(format!("{name}.tmp"));
                files::rename(&path, &half).and_then(|()| files::remove_folder(&half))
            };
            removed.map_err(|source| Error::io(&path, source))?;
        }
        Ok(sync_dir(&self.path)?)
    }

    /// Names of everything in it, sorted: `block-*` before `manifest.json`.
    fn entries(&self) -> Result<Vec<String>> {
        let names = files::names(&self.path).map_err(|source| Error::io(&self.path, source))?;
        Ok(names.iter().map(|name| name.to_string_lossy().into_owned()).collect())
    }

    fn compare(&self, found: &Value, wanted: &Map<String, Value>) -> Result<()> {
        let Value::Object(found) = found else { return Err(self.refuse("manifest.json is no JSON object")) };
        let shown = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), Value::to_string);
        let keys = found.keys().chain(wanted.keys().filter(|key| !found.contains_key(*key)));
        let differences: Vec<String> = keys
            .filter(|key| found.get(*key) != wanted.get(*key))
            .map(|key| format!("{key}: {} then, {} now", shown(found.get(key)), shown(wanted.get(key))))
            .collect();
        if differences.is_empty() {
            return Ok(());
        }
        Err(self.refuse(format!("it was begun with something else: {}", differences.join("; "))))
    }

    fn refuse(&self, what: impl Into<String>) -> Error {
        Error::Unfinished { path: self.path.clone(), what: what.into() }
    }

    fn block_path(&self, i: usize) -> PathBuf {
        self.path.join(format!("block-{i:05}"))
    }

    /// Whether block `i` is finished.
    pub fn has(&self, i: usize) -> bool {
        self.block_path(i).is_dir()
    }

    /// Puts a finished block away.
    pub fn save(&self, i: usize, block: &Block) -> Result<()> {
        let mut parts: Vec<(TensorSpec, Vec<u8>)> = Vec::new();
        let mut part = |name: String, dtype, shape: &[usize], bytes| {
            parts.push((TensorSpec { name, dtype, shape: shape.to_vec() }, bytes));
        };
        let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        for (name, q) in &block.tensors {
            let (of_groups, codes) = ([q.n(), q.groups()], pack(q.codes(), q.k(), q.format()));
            part(format!("{name}.codes"), DType::U8, &[q.n(), row_bytes(q.k(), q.format())], codes);
            part(format!("{name}.scales"), DType::F32, &of_groups, floats(q.scales()));
            match q.zeros() {
                Zeros::Symmetric => {}
                Zeros::Integer(zeros) => {
                    let bytes = zeros.iter().flat_map(|z| z.to_le_bytes()).collect();
                    part(format!("{name}.zeros"), DType::U16, &of_groups, bytes);
                }
                Zeros::Float(offsets) => part(format!("{name}.offsets"), DType::F32, &of_groups, floats(offsets)),
            }
            if let Some(index) = q.group_index() {
                let bytes = index.iter().flat_map(|g| g.to_le_bytes()).collect();
                part(format!("{name}.group_index"), DType::U32, &[q.k()], bytes);
            }
        }
        for (name, values) in &block.changed {
            part(name.clone(), DType::F32, &[values.len()], floats(values));
        }

        let staging = self.path.join(format!("block-{i:05}.tmp"));
        files::create_dir(&staging).map_err(|source| Error::io(&staging, source))?;
        let specs: Vec<TensorSpec> = parts.iter().map(|(spec, _)| spec.clone()).collect();
        let mut writer = create(&staging, &specs, u64::MAX)?;
        for (spec, bytes) in &parts {
            writer.write(&spec.name, bytes)?;
        }
        writer.finish()?;
        let report_path = staging.join(REPORT);
        let report = serde_json::to_vec_pretty(&block.report).map_err(|e| Error::io(&report_path, e.into()))?;
        write_synced(&report_path, &report)?;
        let sums = sums(&staging).map_err(|source| Error::io(&staging, source))?;
        write_synced(&staging.join(SUMS), sums.as_bytes())?;
        sync_dir(&staging)?;
        files::rename(&staging, &self.block_path(i)).map_err(|source| Error::io(&staging, source))?;
        Ok(sync_dir(&self.path)?)
    }

    /// A finished block of layers in this format. Errors: files that are damaged or of other layers.
    pub fn load(&self, i: usize, groups: &[LinearGroup], format: WeightFormat) -> Result<Block> {
        let damaged = |what: String| self.damaged(i, &what);
        let checkpoint = self.checked(i)?;
        let mut block = Block { report: self.report(i)?, ..Block::default() };
        let names = groups.iter().flat_map(|group| &group.layers).map(|(name, _)| name);
        if !names.eq(block.report.iter().map(|layer| &layer.name)) {
            return Err(damaged("its report is about other layers".to_owned()));
        }
        let mut own = Vec::new();
        for (name, shape) in groups.iter().flat_map(|group| &group.layers) {
            let q = load_tensor(&checkpoint, name, [shape.n, shape.k], format).map_err(damaged)?;
            block.tensors.push((name.clone(), q));
            own.extend(["codes", "scales", "zeros", "offsets", "group_index"].map(|part| format!("{name}.{part}")));
        }
        for info in checkpoint.tensors().filter(|info| own.iter().all(|name| name != info.name)) {
            let values = checkpoint.floats(info.name).map_err(|e| damaged(e.to_string()))?.to_f32();
            block.changed.push((info.name.to_owned(), values));
        }
        Ok(block)
    }

    /// One layer of a finished block.
    pub fn tensor(&self, i: usize, name: &str, shape: [usize; 2], format: WeightFormat) -> Result<QTensor> {
        load_tensor(&*self.checked(i)?, name, shape, format).map_err(|what| self.damaged(i, &what))
    }

    fn damaged(&self, i: usize, what: &str) -> Error {
        let again = format!("remove {} to have it computed again", self.block_path(i).display());
        self.refuse(format!("block {i} is damaged: {what}; {again}"))
    }

    /// The tensors of a finished block. Error: its files are not what they were then.
    fn checked(&self, i: usize) -> Result<Arc<Checkpoint>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, checkpoint)) = last.as_ref().filter(|(block, _)| *block == i) {
            return Ok(checkpoint.clone());
        }
        let path = self.block_path(i);
        let damaged = |what: &dyn std::fmt::Display| self.damaged(i, &what.to_string());
        let stored = read_short(&path.join(SUMS)).map_err(|e| damaged(&format_args!("{SUMS}: {e}")))?;
        let found = sums(&path).map_err(|e| damaged(&e))?;
        if stored != found.as_bytes() {
            return Err(damaged(&format_args!("{WEIGHTS} or {REPORT} is not what {SUMS} says")));
        }
        let checkpoint = Arc::new(Checkpoint::open(&path).map_err(|e| damaged(&e))?);
        *last = Some((i, checkpoint.clone()));
        Ok(checkpoint)
    }

    /// The report of a finished block.
    fn report(&self, i: usize) -> Result<Vec<LayerReport>> {
        let value = read_json(&self.block_path(i).join(REPORT))?;
        serde_json::from_value(value).map_err(|e| self.refuse(format!("the report of block {i} is damaged: {e}")))
    }

    /// Removes the folder with all that is in it.
    pub fn remove(self) -> Result<()> {
        // The last to go is the lock, so that nobody begins while this is half gone.
        self.clean(true)?;
        let lock = self.path.join(LOCK);
        files::remove_file(&lock).map_err(|source| Error::io(&lock, source))?;
        match files::remove_dir(&self.path) {
            // Another process may have come into it by now.
            Err(source) if source.kind() != ErrorKind::DirectoryNotEmpty => Err(Error::io(&self.path, source)),
            _ => Ok(()),
        }
    }
}

/// The checksums of a block's files, in the form of `sha256sum`.
fn sums(block: &Path) -> std::io::Result<String> {
    let mut buffer = vec![0; 1 << 20];
    let mut sums = String::new();
    for name in [WEIGHTS, REPORT] {
        let mut file = File::open(block.join(name))?;
        let mut hash = Sha256::new();
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                len => hash.update(&buffer[..len]),
            }
        }
        sums.extend(hash.finalize().iter().map(|byte| format!("{byte:02x}")));
        sums += &format!("  {name}\n");
    }
    Ok(sums)
}

fn load_tensor(
    checkpoint: &Checkpoint,
    name: &str,
    [n, k]: [usize; 2],
    format: WeightFormat,
) -> std::result::Result<QTensor, String> {
    let groups = format.group.count(k);
    let bytes = |part: &str, dtype: DType, shape: &[usize]| -> std::result::Result<&[u8], String> {
        let name = format!("{name}.{part}");
        let info = checkpoint.info(&name).map_err(|e| e.to_string())?;
        if info.dtype != dtype || info.shape != shape {
            return Err(format!("{name}: expected {dtype} {shape:?}, got {} {:?}", info.dtype, info.shape));
        }
        checkpoint.bytes(&name).map_err(|e| e.to_string())
    };
    let floats = |part: &str| -> std::result::Result<Vec<f32>, String> {
        let bytes = bytes(part, DType::F32, &[n, groups])?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    let codes = unpack(bytes("codes", DType::U8, &[n, row_bytes(k, format)])?, k, format);
    let zeros = match format.zero {
        Zero::Symmetric => Zeros::Symmetric,
        Zero::Integer => {
            let bytes = bytes("zeros", DType::U16, &[n, groups])?;
            Zeros::Integer(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect())
        }
        Zero::Float => Zeros::Float(floats("offsets")?),
    };
    let group_index = match checkpoint.contains(&format!("{name}.group_index")) {
        false => None,
        true => {
            let bytes = bytes("group_index", DType::U32, &[k])?;
            Some(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        }
    };
    let q = QTensor::new(format, [n, k], codes, floats("scales")?, zeros, group_index);
    checkpoint.tensor_names().filter(|part| part.starts_with(name)).for_each(|part| checkpoint.release(part));
    q.map_err(|e| format!("{name}: {e}"))
}

/// Bits that a code takes in a byte.
fn field(format: WeightFormat) -> usize {
    if format.bits == 3 { 4 } else { format.bits as usize }
}

/// Bytes of a row of `k` codes.
pub(super) fn row_bytes(k: usize, format: WeightFormat) -> usize {
    k.div_ceil(8 / field(format))
}

fn pack(codes: &[u8], k: usize, format: WeightFormat) -> Vec<u8> {
    let field = field(format);
    let byte =
        |codes: &[u8]| codes.iter().rev().fold(0u8, |byte, code| byte.checked_shl(field as u32).unwrap_or(0) | code);
    codes.chunks_exact(k.max(1)).flat_map(|row| row.chunks(8 / field).map(byte)).collect()
}

fn unpack(bytes: &[u8], k: usize, format: WeightFormat) -> Vec<u8> {
    let (field, mask) = (field(format), format.max_code() as u8);
    let in_byte = 8 / field;
    let mut codes = Vec::with_capacity(bytes.len() * in_byte);
    for row in bytes.chunks_exact(row_bytes(k, format).max(1)) {
        codes.extend((0..k).map(|j| row[j / in_byte] >> (j % in_byte * field) & mask));
    }
    codes
}

fn read_json(path: &Path) -> Result<Value> {
    let text = read_short(path).map_err(|source| Error::io(path, source))?;
    serde_json::from_slice(&text).map_err(|e| Error::Unfinished { path: path.to_owned(), what: e.to_string() })
}

/// A file whose length is bounded. Errors: it is longer, the system's refusal.
fn read_short(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LONGEST_TEXT + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > LONGEST_TEXT {
        true => Err(std::io::Error::other(format!("longer than {LONGEST_TEXT} bytes"))),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests;
