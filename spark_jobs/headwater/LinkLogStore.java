package headwater;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.nio.file.StandardOpenOption;
import java.util.Iterator;
import java.util.UUID;

import io.delta.storage.HadoopFileSystemLogStore;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;

/**
 * How Spark puts an entry into a table's log on a file system: by a link, which is refused to a name that is taken.
 * Delta's own looks whether there is a file and then renames another one over the name: of two writers at the same
 * moment both succeed, and what the first one committed is gone.
 *
 * The same as `put_if_absent` of headwater/delta/storage.py, down to the name of the scratch file, which clean-up knows.
 * Compiled by Janino, that Spark brings along: Java 8 without lambdas, variable arguments and try-with-resources.
 */
public final class LinkLogStore extends HadoopFileSystemLogStore {
    public LinkLogStore(Configuration hadoopConf) {
        super(hadoopConf);
    }

    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration hadoopConf)
            throws IOException {
        if (overwrite.booleanValue()) {
            writeWithRename(path, actions, overwrite, hadoopConf);
            return;
        }
        java.nio.file.Path entry = Paths.get(path.toUri().getPath(), new String[0]);
        String name = "." + UUID.randomUUID().toString().replace("-", "") + ".tmp";
        java.nio.file.Path scratch = entry.resolveSibling(name);
        try {
            writeWhole(scratch, actions);
            try {
                Files.createLink(entry, scratch);
            } catch (FileAlreadyExistsException taken) {
                // A network file system may answer so to the repetition of a request that it has carried out.
                if (!Files.isSameFile(entry, scratch)) {
                    throw taken;
                }
            }
        } finally {
            Files.deleteIfExists(scratch);
        }
    }

    private static void writeWhole(java.nio.file.Path file, Iterator<String> lines) throws IOException {
        FileChannel channel = FileChannel.open(
            file, new StandardOpenOption[] {StandardOpenOption.WRITE, StandardOpenOption.CREATE_NEW});
        try {
            while (lines.hasNext()) {
                ByteBuffer line = ByteBuffer.wrap((lines.next() + "\n").getBytes(StandardCharsets.UTF_8));
                while (line.hasRemaining()) {
                    channel.write(line);
                }
            }
            channel.force(true);
        } finally {
            channel.close();
        }
    }

    /** Of checkpoints, which Hadoop writes: Delta renames them into their place. */
    public Boolean isPartialWriteVisible(Path path, Configuration hadoopConf) {
        return Boolean.TRUE;
    }
}
