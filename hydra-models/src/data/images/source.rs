//! The image data that `--data` names.

use super::cifar::{self, Record};
use super::decode::{Rgb, decode, is_other_image, is_read};
use super::{DecodeMemory, Images, Preprocessor};
use crate::data::folders::{self, HeldOut, ItemFiles, Unread};
use crate::data::{DataError, Split};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One image.
#[derive(Clone, Debug)]
pub(super) enum Image {
    /// A separate file.
    File(PathBuf),
    /// A record of a CIFAR-10 file.
    Record(Record),
}

/// The images that class folders contain.
const IMAGES: ItemFiles = ItemFiles {
    name: "PNG or JPEG images",
    include: |path| is_read(path) || is_other_image(path),
    only_in_classes: true,
    missing: |path| DataError::NoImages { path },
};

/// The images of each class.
pub(super) type ByClass = folders::ByClass<Image>;

impl Image {
    pub fn rgb(&self, memory: &DecodeMemory) -> Result<Rgb, DataError> {
        match self {
            Self::File(path) => decode(path, memory),
            Self::Record(record) => Ok(record.rgb()),
        }
    }

    /// The undecoded bytes.
    pub fn bytes(&self) -> Result<Vec<u8>, DataError> {
        match self {
            Self::File(path) => {
                fs::read(path).map_err(|source| DataError::Read { path: path.clone(), source })
            }
            Self::Record(record) => Ok(record.bytes().to_vec()),
        }
    }

    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Record(_) => None,
        }
    }
}

/// Images with classes, in up to three splits.
#[derive(Clone, Debug)]
pub struct ImageSource {
    name: String,
    classes: Vec<String>,
    splits: [Option<ByClass>; 3],
    held_out: HeldOut,
    unread: Unread,
}

impl ImageSource {
    /// Returns whether [`open`](Self::open) reads the path: a directory with a split's folder, or with CIFAR-10's
    /// files.
    pub fn are_at(path: &Path) -> bool {
        let is_there = |split| folders::of_split(path, split).is_some() || cifar::has(path, split);
        Split::ALL.into_iter().any(is_there)
    }

    /// Lists the images of a directory: `train/`, `validation/` and `test/`, each with a folder per class that contains
    /// PNG or JPEG files; or CIFAR-10's `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`. Classes are
    /// numbered by name, those of CIFAR-10 as in its files. Without validation data, the last tenth of each training
    /// class is used, or the tenth before the last if the last is the test data because that is missing too. Only
    /// CIFAR-10's images are read here.
    ///
    /// # Errors
    /// A directory without images, one that cannot be read, or an unexpected folder structure.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        if !Self::are_at(path) {
            return Err(DataError::NoImages { path: path.to_owned() });
        }
        let mut unread = Unread::default();
        let (classes, splits) = match Split::ALL.into_iter().any(|split| cifar::has(path, split)) {
            true => in_records(path)?,
            false => in_folders(path, &mut unread)?,
        };
        let (splits, held_out) = folders::hold_out(splits);
        Ok(Self { name: path.display().to_string(), classes, splits, held_out, unread })
    }

    /// The path as given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The class names.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Returns whether the data has this split.
    pub fn has(&self, split: Split) -> bool {
        self.splits[split as usize].is_some()
    }

    /// The splits that were taken from the training images.
    pub fn held_out(&self) -> HeldOut {
        self.held_out
    }

    /// Files and folders in the directory that are not read.
    pub fn unread(&self) -> &Unread {
        &self.unread
    }

    /// The images of a split for a model; `numbers` are the class numbers that the model uses. Items alternate between
    /// classes: one image of each comes first, then a second of each, so that the first items cover all classes. Every
    /// image is decoded once to check it.
    ///
    /// # Errors
    /// A missing split, or an image that cannot be read.
    pub fn images(
        &self,
        split: Split,
        preprocessor: &Preprocessor,
        numbers: &[i32],
        memory: &Arc<DecodeMemory>,
    ) -> Result<Images, DataError> {
        let Some(classes) = &self.splits[split as usize] else {
            let (corpus, looked_for) = (self.name.clone(), folders::names(split).to_vec());
            return Err(DataError::SplitMissing { corpus, split, looked_for });
        };
        let items = folders::alternate(classes).map(|(image, class)| (image, numbers[class]));
        Images::new(
            format!("the {split} split of `{}`", self.name),
            items.collect(),
            preprocessor,
            memory.clone(),
        )
    }
}

type Found = (Vec<String>, [Option<ByClass>; 3]);

/// Lists folders.
fn in_folders(directory: &Path, unread: &mut Unread) -> Result<Found, DataError> {
    let (classes, splits) = folders::splits(directory, &IMAGES, unread)?;
    let images = |class: Vec<PathBuf>| class.into_iter().map(Image::File).collect();
    let splits = splits.map(|split| Some(split?.into_iter().map(images).collect()));
    Ok((classes, splits))
}

fn in_records(directory: &Path) -> Result<Found, DataError> {
    let [train, validation, test] = Split::ALL.map(|split| cifar::read(directory, split));
    Ok((cifar::CLASSES.map(str::to_owned).into(), [train?, validation?, test?]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::DataError;
    use hydra_core::{ByteSize, Dataset};
    use image::{GrayImage, Luma, Rgb as Pixel, RgbImage};
    use tempfile::TempDir;

    /// A directory with one folder per class, each with this many images of one colour.
    fn directory(classes: &[(&str, u8, usize)]) -> TempDir {
        let dir = TempDir::new().unwrap();
        for (class, red, count) in classes {
            let folder = dir.path().join(class);
            fs::create_dir_all(&folder).unwrap();
            for index in 0..*count {
                let image = RgbImage::from_pixel(6, 4, Pixel([*red, index as u8, 200]));
                image.save(folder.join(format!("{index:03}.png"))).unwrap();
            }
        }
        dir
    }

    fn open(dir: &TempDir) -> ImageSource {
        ImageSource::open(dir.path()).unwrap()
    }

    fn lens(source: &ImageSource) -> [usize; 3] {
        Split::ALL.map(|split| match &source.splits[split as usize] {
            Some(classes) => classes.iter().map(Vec::len).sum(),
            None => 0,
        })
    }

    fn memory() -> Arc<DecodeMemory> {
        Arc::new(DecodeMemory::new(ByteSize::mib(64)))
    }

    fn refusal(dir: &TempDir) -> String {
        let source = match ImageSource::open(dir.path()) {
            Ok(source) => source,
            Err(error) => return error.to_string(),
        };
        let numbers: Vec<i32> = (0..source.classes().len() as i32).collect();
        let images = source.images(Split::Train, &Preprocessor::of_side(4), &numbers, &memory());
        let error = images.map(|_| ()).unwrap_err();
        hydra_core::with_causes(&error)
    }

    #[test]
    fn what_is_not_there_is_a_tenth_of_each_class() {
        let train = &[("train/a", 1, 20), ("train/b", 2, 9)];
        let alone = open(&directory(train));
        assert_eq!((lens(&alone), alone.held_out()), ([16 + 7, 2 + 1, 2 + 1], HeldOut::ValidationAndTest));
        let tested = open(&directory(&[train[0], train[1], ("test/a", 1, 3)]));
        assert_eq!((lens(&tested), tested.held_out()), ([18 + 8, 2 + 1, 3], HeldOut::Validation));
        let validated = open(&directory(&[train[0], train[1], ("val/a", 1, 3)]));
        assert_eq!((lens(&validated), validated.held_out()), ([29, 3, 0], HeldOut::Nothing));
        let single = open(&directory(&[("train/a", 1, 1)]));
        assert_eq!((lens(&single), single.held_out()), ([1, 0, 0], HeldOut::Nothing));
    }

    #[test]
    fn items_are_of_all_classes_in_turn() {
        let dir = directory(&[("train/b", 2, 3), ("train/a", 1, 2), ("validation/a", 1, 1)]);
        let source = open(&dir);
        assert_eq!(source.classes(), ["a", "b"]);
        let data = source.images(Split::Train, &Preprocessor::of_side(4), &[7, 3], &memory()).unwrap();
        let batch = data.batch(&[0, 1, 2, 3, 4]).unwrap();
        assert_eq!(batch.targets.parts[0].as_i32(), [7, 3, 7, 3, 3]);
        assert_eq!(batch.inputs.parts[0].shape, [5, 3, 4, 4]);
        let red = |item: usize| batch.inputs.parts[0].as_f32()[item * 48];
        assert_eq!([red(0), red(1)], [1_u8, 2].map(|red| (f32::from(red) / 255.0 - 0.5) / 0.5));
        assert_eq!((batch.items, batch.loss_targets, batch.units, data.unit()), (5, 5, 5, "images"));
        assert!(data.batch(&[5]).is_err());
        let content = |data: &Images| {
            let mut all = Vec::new();
            crate::data::Content::content(data, &mut |bytes| all.extend_from_slice(bytes)).unwrap();
            all
        };
        let other = source.images(Split::Train, &Preprocessor::of_side(4), &[3, 7], &memory()).unwrap();
        assert!(content(&data) == content(&data) && content(&data) != content(&other));
    }

    #[test]
    fn modes_are_converted_as_pillow_does_or_named() {
        let dir = directory(&[("train/a", 1, 1)]);
        let file = dir.path().join("train/a/grey.png");
        GrayImage::from_pixel(4, 4, Luma([9])).save(&file).unwrap();
        let clear = image::RgbaImage::from_pixel(4, 4, image::Rgba([10, 20, 30, 0]));
        clear.save(dir.path().join("train/a/see.png")).unwrap();
        let wide = image::ImageBuffer::from_pixel(4, 4, Pixel([0x12FF_u16, 0x34FF, 0x56FF]));
        wide.save(dir.path().join("train/a/wide.png")).unwrap();
        let first = |name: &str| {
            let rgb = Image::File(dir.path().join("train/a").join(name)).rgb(&memory()).unwrap();
            [rgb.bytes[0], rgb.bytes[1], rgb.bytes[2]]
        };
        assert_eq!(first("grey.png"), [9; 3]);
        assert_eq!(first("see.png"), [10, 20, 30]);
        assert_eq!(first("wide.png"), [0x12, 0x34, 0x56]);
        // All pixels are present, but the end chunk is missing.
        let wide = fs::read(dir.path().join("train/a/wide.png")).unwrap();
        fs::write(dir.path().join("train/a/cut.png"), &wide[..wide.len() - 13]).unwrap();
        assert_eq!(first("cut.png"), [0x12, 0x34, 0x56]);
        image::ImageBuffer::from_pixel(4, 4, Luma([900_u16])).save(&file).unwrap();
        let said = refusal(&dir);
        assert!(said.contains("grey.png") && said.contains("16-bit greyscale"), "{said}");
    }

    #[test]
    fn what_is_not_read_is_counted() {
        let dir = directory(&[("train/a", 1, 2), ("valid/a", 1, 1)]);
        assert_eq!(open(&dir).unread(), &Unread::default());
        for name in ["train/a/x.heic", "valid/a/y.HEIC", "train/notes.txt", "labels", ".hidden"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        fs::create_dir(dir.path().join("dev")).unwrap();
        let source = open(&dir);
        let unread = source.unread();
        assert_eq!((unread.files(), unread.folders()), (4, &["dev".to_owned()][..]));
        let said = unread.to_string();
        assert!(said.starts_with("2 .heic, 1 .txt, 1 without an extension, such as `"), "{said}");
    }

    #[test]
    fn an_image_that_needs_too_much_memory_is_named_before_it_is_decoded() {
        let dir = directory(&[("train/a", 1, 1)]);
        // The header of a PNG of 60000 by 60000 pixels, with invalid data.
        let file = dir.path().join("train/a/bomb.png");
        let png = include_bytes!("../../../tests/fixtures/png/bomb.png");
        fs::write(&file, png).unwrap();
        let said = refusal(&dir);
        for part in [
            "bomb.png`",
            "60000 by 60000 pixels",
            "takes 10.06 GiB",
            "64.00 MiB are available",
            "--host-memory",
        ] {
            assert!(said.contains(part), "{part} in {said}");
        }
        let plenty = DecodeMemory::new(ByteSize(u64::MAX));
        let error = Image::File(file).rgb(&plenty).unwrap_err();
        assert!(matches!(error, DataError::ImagePixels { .. }), "{error}");
    }

    #[test]
    fn what_is_wrong_with_a_directory_is_named() {
        let dir = directory(&[("train/a", 1, 2)]);
        let broken = dir.path().join("train/a/000.png");
        let bytes = fs::read(&broken).unwrap();
        fs::write(&broken, &bytes[..bytes.len() - 28]).unwrap();
        let said = refusal(&dir);
        assert!(said.contains("000.png` could not be decoded"), "{said}");
        fs::write(&broken, "no image").unwrap();
        assert!(refusal(&dir).contains("000.png` is not a PNG or JPEG file"), "{}", refusal(&dir));
        fs::remove_file(&broken).unwrap();
        fs::create_dir(dir.path().join("train/b")).unwrap();
        assert!(refusal(&dir).contains("train/b` has no PNG or JPEG images"), "{}", refusal(&dir));
        fs::create_dir(dir.path().join("train/a/within")).unwrap();
        assert!(refusal(&dir).contains("within` is a folder inside a class folder"), "{}", refusal(&dir));
        fs::remove_dir(dir.path().join("train/a/within")).unwrap();
        fs::write(dir.path().join("train/c.png"), "").unwrap();
        fs::remove_dir(dir.path().join("train/b")).unwrap();
        assert!(refusal(&dir).contains("c.png` is not in a class folder"), "{}", refusal(&dir));
        let other = directory(&[("train/a", 1, 2), ("test/b", 1, 2)]);
        let said = refusal(&other);
        assert!(said.contains("test/b` is not in the training data, whose classes are a"), "{said}");
        let none = TempDir::new().unwrap();
        assert!(refusal(&none).contains("no images in"), "{}", refusal(&none));
        let only_test = open(&directory(&[("test/a", 1, 2)]));
        let error = only_test.images(Split::Train, &Preprocessor::of_side(4), &[0], &memory()).unwrap_err();
        assert!(matches!(error, DataError::SplitMissing { .. }));
    }

    #[test]
    fn files_of_cifar_are_read_and_what_is_none_is_named() {
        let dir = TempDir::new().unwrap();
        let record = |class: u8, red: u8| {
            let mut record = vec![class];
            record.extend([red, 2, 3].into_iter().flat_map(|colour| vec![colour; 1024]));
            record
        };
        let train: Vec<u8> = (0..20).flat_map(|index| record(index % 2, index)).collect();
        for (file, records) in (1..).zip(train.chunks(4 * 3073)) {
            fs::write(dir.path().join(format!("data_batch_{file}.bin")), records).unwrap();
        }
        fs::write(dir.path().join("test_batch.bin"), record(9, 77)).unwrap();
        let source = open(&dir);
        assert_eq!((lens(&source), source.held_out()), ([18, 2, 1], HeldOut::Validation));
        assert_eq!((source.classes().len(), source.classes()[9].as_str()), (10, "truck"));
        let numbers: Vec<i32> = (0..10).collect();
        let data = source.images(Split::Test, &Preprocessor::of_side(16), &numbers, &memory()).unwrap();
        let batch = data.batch(&[0]).unwrap();
        assert_eq!(
            (batch.targets.parts[0].as_i32(), batch.inputs.parts[0].shape.as_slice()),
            (&[9][..], &[1, 3, 16, 16][..])
        );
        assert_eq!(batch.inputs.parts[0].as_f32()[0], (77.0 / 255.0 - 0.5) / 0.5);
        for (text, found) in [(record(10, 1), "class 10 at byte 0"), (vec![1; 99], "99 bytes")] {
            fs::write(dir.path().join("test_batch.bin"), text).unwrap();
            let said = ImageSource::open(dir.path()).unwrap_err().to_string();
            assert!(said.contains("test_batch.bin") && said.contains(found), "{said}");
        }
        for file in [2, 5] {
            fs::remove_file(dir.path().join(format!("data_batch_{file}.bin"))).unwrap();
        }
        let said = ImageSource::open(dir.path()).unwrap_err().to_string();
        assert!(
            said.starts_with("the train split of CIFAR-10 is incomplete: add the missing files `"),
            "{said}"
        );
        assert!(said.contains("data_batch_2.bin`, `") && said.ends_with("data_batch_5.bin`"), "{said}");
        assert!(!said.contains("data_batch_1"), "{said}");
    }
}
